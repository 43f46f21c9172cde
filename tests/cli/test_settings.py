"""A settings file: it gives options, the command line wins over it, and what is wrong in it is told."""

import json
import re

import pytest
from command_line import TEXT
from conftest import REPO

from jshadow.cli.fields import command_of
from jshadow.cli.main import parser


def parsed(*words):
    return command_of(parser().parse_args([str(word) for word in words]))


@pytest.fixture
def settings(tmp_path):
    """Writes a settings file, and gives its path."""

    def write(text, name="s.toml"):
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text))
        return str(tmp_path / name)

    return write


def test_the_example_of_the_page_runs(settings, answer, tiny_model):
    page = (REPO / "docs" / "cli.md").read_text()
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    path = settings(re.sub(r'(?m)^model = ".*"$', f'model = "{tiny_model}"', text), "answers.toml")
    [line] = re.findall(r"^jshadow (generate --settings answers.toml) .* (--max-new-tokens 32)$", page, re.MULTILINE)
    words = [path if word == "answers.toml" else word for word in " ".join(line).split()]
    args = parsed(*words)
    assert (args.model, args.policy, args.set, args.stop) == (tiny_model, "quest", ["budget=512"], ["\n\n"])
    assert (args.max_new_tokens, args.compile_cache, args.seed) == (32, False, 0)
    [result] = answer(*words, "--prompt", TEXT)["results"]
    assert result["report"]["policy"].items() >= {"name": "quest", "budget": 512}.items()
    assert (result["report"]["fetch"], len(result["tokens"]) <= 32) == ("device_put", True)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(settings):
    """Lists are replaced, not joined; a file may name the argument without dashes, and settings with dots."""
    table = {"model": "m", "seed": 3, "temperature": 1, "set": {"rank": 8, "keys": {"bits": 2.5}}, "chat": True}
    path = settings(table | {"no_compile_cache": False, "stop": ["a", "b"]}, "s.json")
    args = parsed("generate", "--settings", path)
    assert (args.model, args.seed, args.temperature, args.chat) == ("m", 3, 1.0, True)
    assert (args.set, args.stop, args.compile_cache, args.top_k) == (
        ["rank=8", "keys.bits=2.5"],
        ["a", "b"],
        True,
        None,
    )
    args = parsed("generate", "other", "--seed", "4", "--settings", path, "--stop", "c", "--set", "rank=9")
    assert (args.model, args.seed, args.stop, args.set) == ("other", 4, ["c"], ["rank=9"])
    assert parsed("serve", "--settings", settings('model = "m"\nport = 9\nhost-gib = 2')).host_gib == 2.0


BAD = [
    ("sede = 1", "each key must be an option of the command", "got sede = 1"),
    ('gpu = "h100"', "each key must be an option of the command", "got gpu = 'h100'"),  # an option of another command
    ('settings = "t.toml"', "each key must be an option of the command", "got settings = 't.toml'"),
    ("seed = 1\nseed = 2", "Cannot overwrite a value", "got the line 'seed = 2'"),
    ("top-k = 1\ntop_k = 2", "top_k must be given once", "got it as top-k and as top_k"),
    ("seed = 1.5", "seed must be an integer, got 1.5", ""),
    ("seed = true", "seed must be an integer, got True", ""),
    ('top-p = "most"', "top-p must be a number, got 'most'", ""),
    ("policy = 3", "policy must be a string, got 3", ""),
    ('chat = "yes"', "chat must be true or false, got 'yes'", ""),
    ("stop = {a = 1}", "stop must be a list of strings, got {'a': 1}", ""),
    ("stop = [1]", "stop must be a list of strings, got [1]", ""),
    ('source = "-"', "each key must be an option of the command", "got source = '-'"),  # stands without dashes
    ("seed =", "must be a readable TOML file", "got the line 'seed ='"),
    ("no-compile-cache = 1", "no-compile-cache must be true or false, got 1", ""),
]
BAD_JSON = [
    ('{"seed": 1, "seed": 2}', "seed must be given once, got 1 and 2", ""),
    ('{"set": {"rank": 1, "rank": 2}}', "rank must be given once, got 1 and 2", ""),
    ("[1]", "the settings must be keys with values, got [1]", ""),
    ('{"seed": ', "must be a readable JSON file", "got the line"),
]


@pytest.mark.parametrize(("text", "told", "came"), BAD + BAD_JSON)
def test_a_wrong_file_is_one_error_that_names_it(settings, refused, text, told, came):
    path = settings(text, "s.json" if (text, told, came) in BAD_JSON else "s.toml")
    err = refused(told, "generate", "m", "--settings", path)
    assert err.startswith("jshadow: ConfigError: ")
    assert path in err
    assert came in err
    assert err.count("\n") == 1


def test_a_missing_file_two_files_and_a_missing_model_are_told(settings, refused, tmp_path, capsys):
    refused("none.toml is not: ", "chat", "m", "--settings", tmp_path / "none.toml")
    path = settings("seed = 1")
    refused("--settings must be given once", "chat", "m", "--settings", path, "--settings", path)
    with pytest.raises(SystemExit):
        parsed("chat", "--settings", path)
    assert "the following arguments are required: model" in capsys.readouterr().err
