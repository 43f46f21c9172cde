"""A saved state of a policy from outside, which the command line finds by module:Class."""

import json

from plugins import strangers

from jshadow.cli.main import main
from jshadow.policies import POLICIES

NEWEST = """
import dataclasses
from jshadow.policies import StreamingLLM

@dataclasses.dataclass(frozen=True)
class Newest(StreamingLLM):
    name = "newest_of_all"
"""


def test_a_state_is_continued_by_module_and_class(tiny_model, tmp_path, capsys):
    (tmp_path / "outside.py").write_text(NEWEST)
    common = ["generate", tiny_model, "--dtype", "float32", "--max-new-tokens", "2", "--json"]
    there = ["--policy", "outside:Newest"]
    with strangers(tmp_path):
        assert main([*common, "--prompt", "one?", *there, "--set", "window=16", "--save-state", "kept.state"]) == 0
        capsys.readouterr()
        del POLICIES["newest_of_all"]  # as in another process
        later = [*common, "--prompt", "two?", "--load-state", "kept.state"]
        assert main(later) == 2
        assert "newest_of_all" in capsys.readouterr().err
        assert main([*later, *there]) == 0
        [result] = json.loads(capsys.readouterr().out)["results"]
        assert (result["report"]["policy"]["name"], result["report"]["policy"]["window"]) == ("newest_of_all", 16)
