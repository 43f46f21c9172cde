"""Start workers (`jshadow serve`) that share a library, with vllm-router before them. SIGTERM or Ctrl-C ends them all.

Options that are not listed are given to `jshadow serve`, such as `--dtype float32`. Worker i uses GPU i.
"""

import argparse
import os
import signal
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("model", help="HF directory, or hub id")
parser.add_argument("--library", required=True, help="s3://bucket/path or another object store, or a directory")
parser.add_argument("--port", type=int, default=8000, help="port of the router (default: %(default)s)")
parser.add_argument("--worker-ports", type=int, nargs="+", default=[8001, 8002], help="(default: %(default)s)")
parser.add_argument("--metrics-port", type=int, default=29000, help="router's own metrics (default: %(default)s)")
args, options = parser.parse_known_args()

serve = ["-m", "jshadow", "serve", args.model, "--library", args.library, *options]
router = ["-m", "vllm_router.launch_router", "--policy", "consistent_hash", "--port", str(args.port)]
router += ["--worker-urls", *(f"http://127.0.0.1:{port}" for port in args.worker_ports)]
router += ["--prometheus-port", str(args.metrics_port)]
# A worker whose /ready fails twice, or two of whose requests fail, gets no more. A request that fails is sent again.
router += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1", "--health-failure-threshold", "2"]
router += ["--cb-failure-threshold", "2", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "5"]
router += ["--retry-max-retries", "8", "--worker-startup-check-interval", "1"]

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
workers, last = [], []
try:
    for number, port in enumerate(args.worker_ports):
        gpu = os.environ | {"CUDA_VISIBLE_DEVICES": str(number)}
        workers.append(subprocess.Popen([sys.executable, *serve, "--port", str(port)], env=gpu))
    last.append(subprocess.Popen([sys.executable, *router], env={"RUST_LOG": "warn"} | os.environ))
    while last[0].poll() is None and any(worker.poll() is None for worker in workers):
        time.sleep(0.5)
    sys.exit("the router or all workers have ended")
finally:
    for group in (workers, last):  # the router is there until the workers have finished their answers
        for process in group:
            process.terminate()
        for process in group:
            process.wait()
