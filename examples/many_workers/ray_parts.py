"""Run the parts of `jshadow eval` or `jshadow library add` as tasks of Ray, and merge the parts of an evaluation.

python ray_parts.py --parts 8 eval MODEL --tasks agreement --out /shared/results
"""

import argparse
import subprocess
import sys

import ray

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--parts", type=int, required=True, metavar="N", help="number of parts")
parser.add_argument("--gpus", type=float, default=1, help="GPUs of a part; 0 runs on CPUs (default: %(default)s)")
parser.add_argument("--workers", type=int, metavar="N", help="CPU cores of a local Ray (default: all, or RAY_ADDRESS)")
parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="eval ..., or library add ...")
args = parser.parse_args()
merged = args.command[:1] == ["eval"]
if not args.command or (merged and "--out" not in args.command):
    parser.error("COMMAND must be eval with --out DIR, or library add")


@ray.remote(num_gpus=args.gpus, max_retries=3, retry_exceptions=True)
def run_part(part: str) -> int:
    """Run one part as a separate process, and return its exit code. Ray calls this again if a signal ends it."""
    code = subprocess.run([sys.executable, "-m", "jshadow", *args.command, "--part", part]).returncode
    if code < 0:
        raise RuntimeError(f"part {part} was ended by signal {-code}")
    return code


ray.init(num_cpus=args.workers, include_dashboard=False)
codes = ray.get([run_part.remote(f"{index}/{args.parts}") for index in range(1, args.parts + 1)])
if any(codes):
    sys.exit(f"exit codes of the parts: {codes}")
if merged:
    out = args.command[args.command.index("--out") + 1]
    sys.exit(subprocess.run([sys.executable, "-m", "jshadow", "eval", "--merge", out, "--out", out]).returncode)
