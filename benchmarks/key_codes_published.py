"""Compare published key codes with `TransformCode`: `python benchmarks/key_codes_published.py MODEL [--json]`.

All rows are ShadowKV with the landmarks, the values and the outlier rule of `ShadowKV.packed()`, a budget of 256 and 8
outlier chunks. Only the keys differ. They take as many bits as `packed()`, or are compared with a transform code of
their own bits. The texts are documentation and source code of Python, and essays and HotpotQA's paragraphs. The last
two need NVIDIA's package: `pip install 'jshadow[ruler]'`.

Every row codes and rebuilds the keys once, at the end of the prefill, and keeps the rebuilt keys exactly. So the
library need not have each code, and one compiled program serves all rows. A step of the library rebuilds the same keys.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from allotted_bits import Allotted
from jax import Array
from published_codes import ChannelCode, RotationCode
from rich.console import Console
from rich.table import Table

import jshadow
from jshadow.engine import decode
from jshadow.evaluation.metrics import kl, mean_stderr
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.agreement_texts import agreement, read_data
from jshadow.evaluation.tasks.ruler import ESSAYS
from jshadow.evaluation.tasks.texts import code, documentation, tokens_of
from jshadow.models.config import ModelConfig
from jshadow.policies import Full, ShadowKV
from jshadow.policies.shadowkv import LowRank, TransformCode
from jshadow.policies.shadowkv.key_codecs import ExactCodec, KeyCode, KeyCodec, Sizes, usual_rank
from jshadow.policies.shadowkv.key_codecs.base import Spread

Found = dict[str, dict[tuple[str, int], float]]  # KL by policy, and by text and number of the prompt
SVDQ = (8, 4, 2, 1, 1, 0, 0, 0)  # bits of eight equal groups of columns (SVDq, section 4.2)


# Texts


@functools.cache
def prose(kind: str) -> tuple[str, ...]:
    """Return the sentences of the essays, or the paragraphs of HotpotQA with their titles."""
    if kind == "essays":
        text = " ".join(read_data(ESSAYS)["text"].split())
        return tuple(f"{sentence} " for sentence in re.split(r"(?<=[.?!])\s+", text))
    rows = read_data("hotpotqa.json")
    return tuple(f"{title}\n{''.join(parts)}\n\n" for row in rows for title, parts in row["context"])


def prose_tokens(tokenizer: Any, rng: random.Random, *, kind: str) -> Iterator[int]:
    """Yield token ids of a prose text without end, starting at a random place."""

    def pieces(rng: random.Random) -> Iterator[str]:
        parts = prose(kind)
        return (parts[index % len(parts)] for index in itertools.count(rng.randrange(len(parts))))

    return tokens_of(tokenizer, rng, pieces)


TEXTS: dict[str, Callable[[Any, random.Random], Iterator[int]]] = {
    "documentation": documentation,
    "code": code,
    "essays": functools.partial(prose_tokens, kind="essays"),
    "hotpotqa": functools.partial(prose_tokens, kind="hotpotqa"),
}

# Codes


@dataclasses.dataclass(frozen=True)
class Rounded(ExactCodec):
    """Keeps keys exactly, after coding and rebuilding them.

    Attributes:
        coder: a codec of the library, or an `Allotted`.
    """

    coder: KeyCodec | Allotted

    def encode(
        self,
        k_pre: Array,
        lengths: Array,
        units: int,
        chunk: int,
        weights: Array | None = None,
        spread: Spread | None = None,
    ) -> KeyCode:
        """Code and rebuild the keys k_pre [B, S, h_kv, d], then encode them as `ExactCodec` does."""
        if isinstance(self.coder, Allotted):
            keys = self.coder.rounded_keys(k_pre, lengths, weights)
        else:
            size = -(-k_pre.shape[1] // chunk)
            code = self.coder.encode(k_pre, lengths, size, chunk, weights)
            ids = jnp.broadcast_to(jnp.arange(size), (k_pre.shape[0], k_pre.shape[2], size))
            keys = self.coder.decode(code, ids, chunk).swapaxes(1, 2)[:, : k_pre.shape[1]]
        return super().encode(keys.astype(k_pre.dtype), lengths, units, chunk)


@dataclasses.dataclass(frozen=True)
class RoundedKV(ShadowKV):
    """ShadowKV with a codec `Rounded`. `keys` only says whether errors are weighted.

    Attributes:
        allot: the rounding, or None for that of `keys`.
    """

    allot: Allotted | None = None

    @property
    def coder(self) -> KeyCodec | Allotted:
        """The codec or the `Allotted` that rounds the keys."""
        return self.keys.codec(self.rank) if self.allot is None else self.allot

    @property
    def codec(self) -> Any:
        """The codec of the keys."""
        return Rounded(self.coder)


# Rows


def rows_of(config: ModelConfig) -> dict[str, RoundedKV]:
    """Return the compared policies by name."""
    usual = dataclasses.replace(ShadowKV.packed(), budget=256, outlier_chunks=8)
    norm = 16 / config.head_dim  # bits of a column that the length of a rotated key takes

    def keys(code: Any, allot: Allotted | None = None) -> RoundedKV:
        fields = {field.name: getattr(usual, field.name) for field in dataclasses.fields(ShadowKV)}
        return RoundedKV(**fields | {"keys": code}, allot=allot)

    def allot(weights: str, widths: tuple[int, ...], **settings: Any) -> RoundedKV:
        return keys(TransformCode(bits=2, weights=weights), Allotted(widths, 2 * config.key_columns, **settings))

    return {
        "transform, 2 bits, weighted: packed()": keys(usual.keys),
        "transform, 2 bits": keys(TransformCode(bits=2)),
        "DP over 0, 2, 4, 8 bits, weighted": allot("queries", (0, 2, 4, 8)),
        "DP over 0 to 8 bits, weighted": allot("queries", tuple(range(9)), own_ranges=True),
        f"SVDq, {SVDQ}": allot("none", (0, 1, 2, 4, 8), own_ranges=True, fixed=SVDQ),
        "channel, 2 bits": keys(ChannelCode(bits=2)),
        "transform, 2 bits and a norm, weighted": keys(TransformCode(bits=2 + norm, weights="queries")),
        "rotation, 2 bits": keys(RotationCode(bits=2)),
        f"low rank {usual_rank(config.key_columns)}": keys(LowRank()),
        "transform, 3 bits and a norm, weighted": keys(TransformCode(bits=3 + norm, weights="queries")),
        "rotation, 3 bits": keys(RotationCode(bits=3)),
    }


def token_bytes(policy: RoundedKV, config: ModelConfig, tokens: int) -> tuple[float, float | None]:
    """Return the bytes of a token's keys in bfloat16: its own, and its part of what all tokens share.

    The second is None if the bits depend on the prompt, because then the number of columns in the basis does too.
    """
    if policy.allot is not None:
        return policy.allot.total / 8, None
    codec, sizes = policy.resolve(config, tokens).coder, Sizes(config.kv_heads, config.head_dim, "bfloat16")
    assert isinstance(codec, KeyCodec)
    own = codec.read_bytes(sizes) * (1 if codec.joint else config.kv_heads)
    return own, (codec.nbytes(tokens, 1, sizes) - own * tokens) / tokens


def divergences(params: Any, policies: list[RoundedKV], case: Case) -> list[float]:
    """Return the KL of each policy from full attention, mean over the forced tokens of a case.

    All policies keep keys in one form. So one compiled program serves them all after the prompt.
    """
    forced = np.array([case.forced], np.int32)
    prompt, length = np.array([case.prompt], np.int32), np.array([len(case.prompt)], np.int32)
    capacity = len(case.prompt) + len(case.forced)
    every = [Full(), *policies]
    found = decode.prefill_many(params, prompt, length, every, capacity=capacity, fetch="resident")
    states = [state for _, state in found]
    states = [states[0], *(state.replace(specs=states[1].specs, policy=states[1].policy) for state in states[1:])]
    logits = []
    for state in states:
        out, _ = decode.extend(params, forced, np.array([forced.shape[1]], np.int32), state, logits="all")
        logits.append(np.asarray(out)[0])
    return [float(kl(logits[0], own).mean()) for own in logits[1:]]


def summary(config: ModelConfig, policies: dict[str, RoundedKV], kls: Found, tokens: int) -> list[dict[str, Any]]:
    """Return one row for each policy. It is compared with the weighted transform code of as many bytes, if any."""
    sizes = {name: token_bytes(policy, config, tokens) for name, policy in policies.items()}
    ours = {sizes[name][0]: kls[name] for name in reversed(policies) if "weighted" in name and "transform" in name}
    rows = []
    for name, own in kls.items():
        mean, error = mean_stderr(list(own.values()))
        base = ours.get(sizes[name][0])
        texts = dict.fromkeys(task for task, *_ in own)
        rows.append(
            {
                "keys": name,
                "bytes": sizes[name][0],
                "shared": sizes[name][1],
                "prompts": len(own),
                "kl": mean,
                "kl_stderr": error,
                "ours / this": None if base is None else float(np.mean(list(base.values()))) / mean,
                "lower": None if base is None else sum(own[place] < base[place] for place in own),
                "difference": None if base is None else mean_stderr([own[place] - base[place] for place in own]),
                **{text: mean_stderr([own[place] for place in own if place[0] == text]) for text in texts},
            }
        )
    return rows


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=3, help="prompts of each kind of text")
    parser.add_argument("--texts", default=",".join(TEXTS), help="kinds of text, comma list")
    parser.add_argument("--only", default="", help="rows whose name holds one of these, comma list")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each prompt, and no table")
    args = parser.parse_args()
    params = jshadow.load(args.model, "float32")
    only = args.only.split(",")
    policies = {name: row for name, row in rows_of(params.config).items() if any(text in name for text in only)}
    kls: Found = {name: {} for name in policies}
    for seed, text in itertools.product(range(args.samples), args.texts.split(",")):
        case = agreement(params.tokenizer, args.length, 0.5, seed, source=TEXTS[text])
        for name, own in zip(policies, divergences(params, list(policies.values()), case), strict=True):
            kls[name][text, seed] = own
        print(f"{text}, prompt {seed + 1} of {args.samples}", file=sys.stderr)
        if args.json:
            line = {"text": text, "prompt": seed, "kl": {name: own[text, seed] for name, own in kls.items()}}
            print(json.dumps(line), flush=True)
    if args.json:
        return
    rows = summary(params.config, policies, kls, args.length)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(shown(value) for value in row.values()))
    Console().print(table)


def shown(value: Any) -> str:
    """Return a cell: a number, or a mean and its standard error."""
    if isinstance(value, tuple):
        return " ± ".join(shown(part) for part in value)
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    main()
