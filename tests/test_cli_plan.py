"""`jshadow plan` as a user calls it: a lone config.json, tables, --json, typed errors."""

import json

import pytest

from jshadow.cli import main
from jshadow.gpus import GPUS

# As Meta publishes it, the keys that matter here.
LLAMA_31_8B = {
    "model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 32, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 5e5,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """A config.json with nothing beside it."""
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_31_8B))
    return str(tmp_path / "llama.json")


def answer(capsys, *arguments):
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plans"]


def test_a_config_alone_is_planned_on_every_gpu(config, capsys):
    plans = answer(capsys, config, "--context", "122880")
    assert [plan["gpu"]["name"] for plan in plans] == list(GPUS)
    assert [plan["full"]["largest_batch"] for plan in plans] == [4, 4, 8]
    for plan in plans:
        assert plan["capacity"] == 122880 + 64
        assert plan["chosen"]["policy"]["name"] == "shadowkv"
        assert plan["chosen"]["policy"]["rank"] == 160
        assert plan["chosen"]["largest_batch"] >= 6 * plan["full"]["largest_batch"]
        step = plan["chosen"]["step"]
        assert {"weights", "left", "right", "landmarks", "outliers", "window"} <= step["hbm_bytes"].keys()
        assert step["pcie_bytes"] > 0
        ratio = step["tokens_per_second"] / plan["full"]["step"]["tokens_per_second"]
        assert plan["ratio"] == pytest.approx(ratio)


def test_a_directory_means_the_same(config, capsys, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_31_8B))
    options = ("--context", "4096", "--gpu", "h200", "--count", "2", "--batch", "3", "--fetch", "resident")
    [plan] = answer(capsys, config, *options)
    assert [plan] == answer(capsys, str(tmp_path / "model"), *options)
    assert (plan["count"], plan["chosen"]["batch"], plan["fetch"]) == (2, 3, "resident")
    assert plan["chosen"]["host_bytes"] == plan["chosen"]["step"]["pcie_bytes"] == 0


def test_auto_means_what_it_means_on_a_gpu(config, capsys):
    [plan] = answer(capsys, config, "--context", "4096", "--gpu", "h100", "--fetch", "auto")
    assert plan["fetch"] == "device_put"


def test_tables_say_what_they_stand_on(config, capsys):
    assert main(["plan", config, "--context", "122880", "--gpu", "a100-80gb"]) == 0
    out = capsys.readouterr().out
    for told in ("largest batch", "prefilled in one call", "step reads landmarks, GB", "step reads cache, GB",
                 "step moves over PCIe, GB", "tokens/s, overlapped", "2,039 GB/s HBM, 31.5 GB/s PCIe",
                 "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):  # fmt: skip
        assert told in out.replace("\n", " ").replace("  ", " ")
    assert "nan" not in out


def test_a_batch_that_does_not_fit_is_shown_as_such(config, capsys):
    assert main(["plan", config, "--context", "122880", "--gpu", "h100", "--policy", "full", "--batch", "5"]) == 0
    assert "5 (no fit)" in capsys.readouterr().out
    assert main(["plan", config, "--context", "8", "--gpu", "h100", "--set", "rank=8"]) == 0
    assert "nothing to select" in capsys.readouterr().out


def test_bytes_by_length_from_a_config_alone(config, capsys):
    [plan] = answer(capsys, config, "--lengths", "1024")
    assert plan["full_bytes"] == (1024 + 64) * 2 * 2 * 1024 * 32


def test_help_names_the_variable(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for told in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "75 %", "--repeat-share", "a100-80gb, h100, h200"):
        assert told in out


GPU = ["--context", "4096", "--gpu", "h100"]
BAD = {
    "gpu": (["--context", "4096", "--gpu", "tpu"], "ConfigError: gpu must be one of"),
    "count": ([*GPU, "--count", "3"], "ConfigError: count must divide kv_heads=8, got 3"),
    "no_gpu": ([*GPU, "--count", "0"], "ConfigError: count must be at least 1"),
    "batch": ([*GPU, "--batch", "-1"], "ConfigError: batch must be at least 1"),
    "context": (["--context", "131072"], "CapacityError: context + max_new_tokens"),
    "no_context": (["--gpu", "h100"], "ConfigError: --gpu must come with --context"),
    "no_context_repeats": (["--repeat-share", "0"], "ConfigError: --repeat-share must come with --context"),
    "both": ([*GPU, "--lengths", "5"], "ConfigError: --lengths must be left out"),
    "lengths": (["--lengths", "4,x"], "ConfigError: --lengths must be a comma list"),
    "repeats": ([*GPU, "--repeat-share", "0.6"], "ConfigError: repeat_share must be 0"),
    "policy": ([*GPU, "--policy", "magic"], "ConfigError: policy must be one of"),
    "setting": ([*GPU, "--set", "rank=9999"], "ConfigError: shadowkv.rank"),
    "dtype": ([*GPU, "--dtype", "int3"], "ConfigError: dtype must be one of"),
    "fetch": ([*GPU, "--fetch", "mail"], "ConfigError: fetch must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_told_on_stderr_alone(config, case, capsys):
    options, told = BAD[case]
    assert main(["plan", config, *options, "--json"]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(("name", "text"), [
    ("none.json", None), ("none/config.json", None), ("list.json", "[]"), ("torn.json", '{"model_type"'),
    ("other.json", '{"model_type": "magic"}'), ("odd.json", json.dumps(LLAMA_31_8B | {"hidden_size": "wide"})),
])  # fmt: skip
def test_a_bad_config_is_told(name, text, capsys, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["plan", str(tmp_path / name), *GPU]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jshadow: C")
    assert "Error" in captured.err
    assert captured.out == ""
