"""The scripts and manifests of examples/many_workers and examples/several_hosts start commands of this version."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from conftest import REPO

from jshadow.cli.fields import command_of
from jshadow.cli.main import parser
from jshadow.ops.parts import Part, parse_part

MANY, HOSTS = REPO / "examples" / "many_workers", REPO / "examples" / "several_hosts"
pytestmark = pytest.mark.process  # of bash, which take milliseconds
SCRIPTS = [MANY / "slurm_array.sh", HOSTS / "slurm.sh"]
JOB = yaml.safe_load((MANY / "kubernetes_indexed_job.yaml").read_text())
GROUP = yaml.safe_load((HOSTS / "kubernetes_leaderworkerset.yaml").read_text())
PODS = {"job": JOB["spec"]["template"], "group": GROUP["spec"]["leaderWorkerTemplate"]["workerTemplate"]}
VERSIONS = ("1.29.0", kubernetes_validate.latest_version())
# Options of several processes that run one model.
TOGETHER = {"--mesh", "--coordinator", "--processes", "--process", "--join-timeout"}
ECHO = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps([sys.argv[0].rpartition('/')[2], *sys.argv[1:]]))\n"


@pytest.fixture
def started(tmp_path: Path):
    """Runs words in an environment where `jshadow`, `srun` and `sleep` print their own words. Returns these."""
    for name in ("jshadow", "srun", "sleep"):
        (tmp_path / name).write_text(ECHO)
        (tmp_path / name).chmod(0o755)

    def started(words: list[str], **variables: str) -> list[list[str]]:
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(words, env={"PATH": path} | variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return started


def options_of(words: list[str]):
    """The options that a command of jshadow gets, and those of TOGETHER by name."""
    assert words[0] == "jshadow"
    together = {name: words[words.index(name) + 1] for name in sorted(TOGETHER) if name in words}
    return command_of(parser().parse_args(words[1:])), together


def test_the_scripts_are_sound_and_the_readmes_name_every_file():
    beside = Path(sys.executable).parent
    shellcheck = shutil.which("shellcheck", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck, "the extra `dev` has it"
    done = subprocess.run([shellcheck, *map(str, SCRIPTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for folder in (MANY, HOSTS):
        text = (folder / "README.md").read_text()
        named = set(re.findall(r"\]\(([^)/]+)\)", text))
        assert named == {path.name for path in folder.iterdir() if path.name not in ("README.md", "__pycache__")}


def sbatch(script: Path) -> dict[str, str]:
    """The options of Slurm in a script."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), flags=re.MULTILINE))


def test_each_task_of_the_slurm_array_runs_a_part(started):
    script = ["bash", str(MANY / "slurm_array.sh")]
    first, last = map(int, sbatch(MANY / "slurm_array.sh")["array"].split("-"))
    assert first == 1
    for task in range(first, last + 1):
        [words] = started([*script, "eval", "a model", "--out", "o"], SLURM_ARRAY_TASK_ID=str(task))
        args, _ = options_of(words)
        part = parse_part(args.part)
        assert (words[1], args.model, args.out, part) == ("eval", "a model", "o", Part(task, last))
    [words] = started([*script, "library", "add", "d", "--model", "m", "a.txt"], SLURM_ARRAY_TASK_ID="3", PARTS="4")
    args, _ = options_of(words)
    assert (words[2], args.files, args.part) == ("add", ["a.txt"], "3/4")


def test_the_slurm_script_of_several_hosts_starts_a_process_for_each_gpu(started):
    script, options = HOSTS / "slurm.sh", sbatch(HOSTS / "slurm.sh")
    [words] = started(["bash", str(script), "a model", "p.txt"])
    assert words[0] == "srun"
    args, together = options_of(words[words.index("jshadow") :])
    assert (words[words.index("jshadow") + 1], args.model, args.prompt_file) == ("generate", "a model", "p.txt")
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert together["--mesh"] == f"tp={int(options['nodes']) * int(options['gpus-per-node'])}"
    assert not together.keys() & {"--coordinator", "--processes", "--process"}  # Slurm's environment has them
    assert subprocess.run(["bash", str(script)], capture_output=True).returncode == 1


@pytest.mark.parametrize("name", PODS)
def test_a_manifest_fits_its_schema_and_what_a_pod_names_is_there(name):
    """The schema of a LeaderWorkerSet is no part of Kubernetes, but that of its pods is."""
    spec = PODS[name]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    for version in VERSIONS:
        for manifest in (pod, *([JOB] if name == "job" else [])):
            kubernetes_validate.validate(manifest, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod | {"spec": spec | {"volume": []}}, version, strict=True)
    [container] = spec["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]


def words_of(pod: dict, started, **variables: str) -> list[list[str]]:
    """What a pod starts, in its environment."""
    [container] = pod["spec"]["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    return started([*container["command"], *container["args"]], **given, **variables)


def test_each_pod_of_the_job_runs_a_part(started):
    spec = JOB["spec"]
    assert spec["completionMode"] == "Indexed"
    for index in range(spec["completions"]):
        [words] = words_of(PODS["job"], started, JOB_COMPLETION_INDEX=str(index))
        assert parse_part(options_of(words)[0].part) == Part(index + 1, spec["completions"])
    [rule, _] = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == PODS["job"]["spec"]["containers"][0]["name"]
    assert PODS["job"]["spec"]["restartPolicy"] == "Never"  # the API refuses a policy of failures with another one


def test_each_pod_of_the_group_is_a_process(started):
    """With the variables that the controller of a LeaderWorkerSet sets."""
    assert (GROUP["apiVersion"], GROUP["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template, [container] = GROUP["spec"]["leaderWorkerTemplate"], PODS["group"]["spec"]["containers"]
    size, gpus = template["size"], container["resources"]["limits"]["nvidia.com/gpu"]
    [port] = container["ports"]
    variables = {"LWS_LEADER_ADDRESS": "jshadow-0.jshadow", "LWS_GROUP_SIZE": str(size)}
    for index in range(size):
        words, asleep = words_of(PODS["group"], started, **variables, LWS_WORKER_INDEX=str(index))
        _, together = options_of(words)
        assert (words[1], asleep[0]) == ("generate", "sleep")
        wanted = {"--mesh": f"tp={size * int(gpus)}", "--processes": str(size), "--process": str(index)}
        wanted |= {"--coordinator": f"jshadow-0.jshadow:{port['containerPort']}", "--join-timeout": "600"}
        assert together == wanted
