"""Run the tests of a room on each mutant of the library.

`python -m mutate choose` writes the list of mutants. `python -m mutate run` applies each in a copy of the tree, runs
the tests of its room until the first failure, and writes what happened. A mutant is `killed` by the first test that
fails, or it is `living`. With --only living, mutants of an earlier run that were killed are left out: whatever the new
suite kills, the old one cannot kill alone.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mutate.sites import ROOMS, Mutant, chosen

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).parent / "mutants.json"
FIRST = 3  # files that run before the others: most mutants are killed there
QUICK = "not slow and not real"


def test_files(tree: Path, mutant: Mutant) -> list[str]:
    """Return the test files of a mutant's room, those that name its module or function first."""
    words = [Path(mutant.path).stem, *mutant.function.split(".")]
    files = [path for room in ROOMS[mutant.room] for path in sorted((tree / room).rglob("test_*.py"))]

    def score(path: Path) -> int:
        text = path.read_text()
        return -sum(len(re.findall(rf"\b{re.escape(word)}\b", text)) for word in words) - 100 * (words[0] in path.stem)

    return [str(path.relative_to(tree)) for path in sorted(files, key=score)]


def result_of(mutant: Mutant, args: argparse.Namespace) -> dict[str, Any]:
    """Apply one mutant in a worktree of the commit, and run its tests."""
    row: dict[str, Any] = {"mutant": str(mutant), "room": mutant.room, "kind": mutant.kind}
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--detach", "-q", str(tree), args.commit], check=True)
        try:
            path = tree / mutant.path
            try:
                path.write_text(mutant.applied(path.read_text()))
            except (LookupError, OSError) as error:
                return row | {"result": "gone", "why": str(error)}
            files = test_files(tree, mutant)
            found = _tested(tree, files[:FIRST], args)
            if found["result"] == "living" and files[FIRST:]:
                found = _tested(tree, files[FIRST:], args)
            return row | found
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=True)


def _tested(tree: Path, files: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run test files in a tree until one fails."""
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(args.cache.resolve()), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-m", args.marks, *files]
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=args.seconds)
    except subprocess.TimeoutExpired:
        return {"result": "timeout", "seconds": args.seconds}
    seconds = round(time.monotonic() - start)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return {"result": "living", "seconds": seconds}
    return {
        "result": "killed",
        "by": failed[0] if failed else done.stdout[-300:] + done.stderr[-300:],
        "seconds": seconds,
    }


def main() -> int:
    """Run one command. Returns the exit status: 0, also if mutants live."""
    parser = argparse.ArgumentParser(
        prog="mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("choose", "run"))
    parser.add_argument("--count", type=int, default=80, help="mutants that `choose` draws (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="HEAD", help="the tree whose library and tests run (default: %(default)s)")
    parser.add_argument("--marks", default=QUICK, help="the tests, as pytest's -m takes them (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1200, help="time of one mutant (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rooms", help="only these rooms, as a comma list")
    parser.add_argument("--only", type=Path, help="only the mutants that live in this file of results")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".cache" / "jax-mutants", help="folder of compiled programs"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".cache" / "mutants.jsonl", help="a line for each mutant")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    args = parser.parse_args()
    if args.command == "choose":
        mutants = chosen(ROOT, args.count, args.seed)
        LIST.write_text(json.dumps([vars(mutant) for mutant in mutants], indent=1) + "\n")
        print(Counter(mutant.room for mutant in mutants), file=sys.stderr)
        return 0
    mutants = [Mutant(**entry) for entry in json.loads(LIST.read_text())]
    if args.rooms:
        mutants = [mutant for mutant in mutants if mutant.room in args.rooms.split(",")]
    if args.only:
        lines = map(json.loads, args.only.read_text().splitlines())
        living = {line["mutant"] for line in lines if line["result"] != "killed"}
        mutants = [mutant for mutant in mutants if str(mutant) in living]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda mutant: result_of(mutant, args), mutants):
            done.append(row)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{len(done)}/{len(mutants)} {row['result']:8} {row['mutant']}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps(done))
        return 0
    counts = Counter((row["room"], row["result"]) for row in done)
    for room in sorted({row["room"] for row in done}):
        print(
            f"{room:20}"
            + "".join(f" {name} {count}" for (where, name), count in sorted(counts.items()) if where == room)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
