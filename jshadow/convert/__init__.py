"""Makes an ordinary Hugging Face directory out of a GGUF file, or of another directory in a new dtype."""

import os
from collections.abc import Callable
from pathlib import Path

from jshadow.convert.files import refuse_existing
from jshadow.convert.gguf import convert_gguf
from jshadow.convert.huggingface import locate
from jshadow.convert.huggingface_write import rewrite

__all__ = ["convert"]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the checkpoint `src` as a new Hugging Face directory `dst`.

    The directory is made under a temporary name beside `dst` and renamed when it is complete and synced; on any
    failure, Ctrl-C included, nothing is left.

    Args:
        src: a .gguf file, a Hugging Face directory, or a hub id.
        dst: directory to make; must not exist.
        dtype: dtype of the weights written: "float32", "bfloat16" or "float16".
        progress: called after each tensor with (tensors written, tensors in all).

    Raises:
        CheckpointError: `dst` exists or cannot be written; `src` is missing, damaged, of an unsafe kind, or does not
            fit its own config.
        ConfigError: a model, tokenizer or dtype that is not supported.
    """
    target = Path(dst)
    refuse_existing(target)  # before minutes of download
    path = Path(src).expanduser()
    if path.suffix == ".gguf":
        convert_gguf(path, target, dtype, progress)
    else:
        rewrite(locate(src), target, dtype, progress)
