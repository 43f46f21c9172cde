"""Compare published key codes with `TransformCode`: `python benchmarks/key_codes_published.py MODEL [--json]`.

All rows are ShadowKV with the landmarks, the values and the outlier rule of `ShadowKV.packed()`, a budget of 256 and 8
outlier chunks. Only the keys differ. They take as many bits as `packed()`, or are compared with a transform code of
their own bits. The texts are documentation and source code of Python, and essays and HotpotQA's paragraphs. The last
two need NVIDIA's package: `pip install 'jshadow[ruler]'`.

Codes whose bits depend on the prompt round the keys once, at the end of the prefill, and keep the rounded keys exactly.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from key_codes import Found, records
from rich.console import Console
from rich.table import Table

import jshadow
from jshadow.errors import ConfigError
from jshadow.evaluation.metrics import mean_stderr
from jshadow.evaluation.settings import Setup
from jshadow.evaluation.tasks import TASKS as TASK_TABLE
from jshadow.evaluation.tasks.agreement import agreement
from jshadow.evaluation.tasks.ruler.package import DISTRIBUTION, INSTALL
from jshadow.evaluation.tasks.texts import tokens_of
from jshadow.models.config import ModelConfig
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import ChannelCode, LowRank, RotationCode, TransformCode
from jshadow.policies.shadowkv.key_codecs import ExactCodec, KeyCode, Sizes, usual_rank
from jshadow.policies.shadowkv.key_codecs.basis import leading_columns
from jshadow.policies.shadowkv.key_codecs.midrise import steps
from jshadow.policies.shadowkv.key_codecs.prompt_keys import PromptKeys, side_by_side

TASKS = ("agreement", "agreement_code", "essays", "hotpotqa")
SVDQ = (8, 4, 2, 1, 1, 0, 0, 0)  # bits of eight equal groups of columns (SVDq, section 4.2)
LOADS = np.geomspace(1.2, 8, 8)  # ranges to try, in standard deviations


# Texts


def prose_file(name: str) -> Any:
    """Read a file of NVIDIA's package. Raises ConfigError if it is not installed."""
    try:
        place = importlib.metadata.distribution(DISTRIBUTION).locate_file(
            f"long_context_eval/data/synthetic/json/{name}"
        )
        return json.loads(Path(str(place)).read_text(encoding="utf-8"))
    except (importlib.metadata.PackageNotFoundError, OSError) as error:
        raise ConfigError(f"essays and hotpotqa need {name} of the package {DISTRIBUTION}: {INSTALL}") from error


@functools.cache
def prose(kind: str) -> tuple[str, ...]:
    """Return the sentences of the essays, or the paragraphs of HotpotQA with their titles."""
    if kind == "essays":
        text = " ".join(prose_file("PaulGrahamEssays.json")["text"].split())
        return tuple(f"{sentence} " for sentence in re.split(r"(?<=[.?!])\s+", text))
    rows = prose_file("hotpotqa.json")
    return tuple(f"{title}\n{''.join(parts)}\n\n" for row in rows for title, parts in row["context"])


def prose_tokens(tokenizer: Any, rng: random.Random, *, kind: str) -> Iterator[int]:
    """Yield token ids of a prose text without end, starting at a random place."""

    def pieces(rng: random.Random) -> Iterator[str]:
        parts = prose(kind)
        return (parts[index % len(parts)] for index in itertools.count(rng.randrange(len(parts))))

    return tokens_of(tokenizer, rng, pieces)


# Codes whose bits depend on the prompt, or are no powers of two


def column_errors(x: Array, real: Array, bits: int) -> tuple[Array, Array]:
    """Round columns x [S, W] to `bits` bits, with the range of least squared error for each column.

    Returns:
        The rounded columns, zero without bits, and their squared errors over the real tokens [W].
    """
    if bits == 0:
        return jnp.zeros_like(x), jnp.where(real, x**2, 0).sum(axis=0)
    half, sigma = 2.0 ** (bits - 1), jnp.sqrt(jnp.where(real, x**2, 0).mean(axis=0))

    def attempt(best: tuple[Array, Array], load: Array) -> tuple[tuple[Array, Array], None]:
        return least(best, rounded(x, sigma * load / half, half), x, real), None

    none = jnp.zeros_like(x), jnp.full(x.shape[1], jnp.inf)
    return lax.scan(attempt, none, jnp.asarray(LOADS, jnp.float32))[0]


def rounded(x: Array, step: Array, half: float) -> Array:
    """Round to a mid-rise quantizer of 2 * half levels."""
    codes = jnp.clip(jnp.floor(x / jnp.where(step > 0, step, 1)), -half, half - 1)
    return (codes + 0.5) * step


def least(best: tuple[Array, Array], tried: Array, x: Array, real: Array) -> tuple[Array, Array]:
    """Return, for each column, the better of the best so far and of new values, with its error."""
    error = jnp.where(real, (tried - x) ** 2, 0).sum(axis=0)
    better = error < best[1]
    return jnp.where(better, tried, best[0]), jnp.where(better, error, best[1])


def usual_errors(x: Array, real: Array, bits: int) -> tuple[Array, Array]:
    """Round as `column_errors`, with the ranges of `TransformCode`, which has 8, 4 and 2 bits."""
    if bits == 0:
        return column_errors(x, real, 0)
    there = jnp.where(real, x, 0)
    sigma, largest = jnp.sqrt((there**2).sum(axis=0) / real.sum()), jnp.abs(there).max(axis=0)
    profile = tuple(x.shape[1] * (bits == kind) for kind in (8, 4, 2))
    tried = rounded(x, steps(sigma, largest, profile), 2.0 ** (bits - 1))  # type: ignore[arg-type]
    return tried, jnp.where(real, (tried - x) ** 2, 0).sum(axis=0)


def allotted(errors: Array, widths: tuple[int, ...], total: int) -> Array:
    """Return which width each column gets, so that the sum of errors is least: int [W]. By dynamic programming.

    Args:
        errors: the error of each column with each width [W, widths].
        widths: the numbers of bits to choose from, rising from 0.
        total: bits of all columns together, at most.
    """

    def forward(best: Array, error: Array) -> tuple[Array, Array]:
        # best[b]: the least error of the columns so far with at most b bits
        after = [jnp.concatenate([jnp.full(width, jnp.inf), best[: total + 1 - width]]) for width in widths]
        every = jnp.stack(after) + error[:, None]
        return every.min(axis=0), every.argmin(axis=0)

    def backward(left: Array, chosen: Array) -> tuple[Array, Array]:
        return left - jnp.asarray(widths)[chosen[left]], chosen[left]

    _, chosen = lax.scan(forward, jnp.zeros(total + 1), errors)
    return lax.scan(backward, jnp.asarray(total), chosen, reverse=True)[1]


@dataclasses.dataclass(frozen=True)
class Allotted(ExactCodec):
    """Keeps keys exactly, after rounding their coefficients in the basis of `TransformCode`.

    Attributes:
        widths: the numbers of bits that a column may have.
        total: bits of a token.
        fixed: the bits of each of eight groups of columns, or () if dynamic programming decides them.
        own_ranges: whether each column has its range of least error, and not that of `TransformCode`.
    """

    widths: tuple[int, ...] = (0, 2, 4, 8)
    total: int = 384
    fixed: tuple[int, ...] = ()
    own_ranges: bool = False

    def encode(self, k_pre: Array, lengths: Array, units: int, chunk: int, weights: Array | None = None) -> KeyCode:
        """Round the keys k_pre [B, S, h_kv, d], then encode them as `ExactCodec` does."""
        plain = PromptKeys(k_pre, lengths, k_pre.shape[1], weights)
        mean = plain.mean_key()
        keys = dataclasses.replace(plain, mean=mean)
        columns = k_pre.shape[2] * k_pre.shape[3]
        basis = leading_columns(keys.gram(), columns)
        x, _ = keys.coefficients(basis)(jnp.int32(0))
        real = (jnp.arange(x.shape[1]) < lengths[:, None])[..., None]
        got = jnp.einsum("bsr,bmr->bsm", jax.vmap(self.rounds)(x, real), basis, precision=lax.Precision.HIGHEST)
        got = got if weights is None else got / side_by_side(weights)[:, None]
        got = got.reshape(k_pre.shape) + mean[:, None]
        return super().encode(got.astype(k_pre.dtype), lengths, units, chunk)

    def rounds(self, x: Array, real: Array) -> Array:
        """Round the coefficients of one prompt x [S, W]."""
        errors_of = column_errors if self.own_ranges else usual_errors
        values, errors = zip(*(errors_of(x, real, bits) for bits in self.widths), strict=True)
        if self.fixed:
            groups = np.repeat([self.widths.index(bits) for bits in self.fixed], x.shape[1] // len(self.fixed))
            chosen = jnp.asarray(groups)
        else:
            chosen = allotted(jnp.stack(errors, axis=1), self.widths, self.total)
        return jnp.take_along_axis(jnp.stack(values), chosen[None, None], axis=0)[0]


@dataclasses.dataclass(frozen=True)
class AllottedKV(ShadowKV):
    """ShadowKV with a codec `Allotted`. `keys` says only whether errors are weighted."""

    allot: Allotted = dataclasses.field(default_factory=Allotted)

    @property
    def codec(self) -> Any:
        """The codec of the keys."""
        return self.allot


# Rows


def rows_of(config: ModelConfig) -> dict[str, ShadowKV]:
    """Return the compared policies by name."""
    usual = dataclasses.replace(ShadowKV.packed(), budget=256, outlier_chunks=8)
    norm = 16 / config.head_dim  # bits of a column that the length of a rotated key takes

    def keys(code: Any, rank: int | None = None) -> ShadowKV:
        return dataclasses.replace(usual, keys=code, rank=rank)

    def allot(weights: str, **settings: Any) -> ShadowKV:
        fields = {field.name: getattr(usual, field.name) for field in dataclasses.fields(ShadowKV)}
        fields["keys"] = TransformCode(bits=2, weights=weights)
        return AllottedKV(**fields, allot=Allotted(total=2 * config.key_columns, **settings))

    return {
        "transform, 2 bits, weighted: packed()": usual,
        "transform, 2 bits": keys(TransformCode(bits=2)),
        "DP over 0, 2, 4, 8 bits, weighted": allot("queries"),
        "DP over 0 to 8 bits, weighted": allot("queries", widths=tuple(range(9)), own_ranges=True),
        f"SVDq, {SVDQ}": allot("none", widths=(0, 1, 2, 4, 8), own_ranges=True, fixed=SVDQ),
        "channel, 2 bits": keys(ChannelCode(bits=2)),
        "transform, 2 bits and a norm, weighted": keys(TransformCode(bits=2 + norm, weights="queries")),
        "rotation, 2 bits": keys(RotationCode(bits=2)),
        f"low rank {usual_rank(config.key_columns)}": keys(LowRank()),
        "transform, 3 bits and a norm, weighted": keys(TransformCode(bits=3 + norm, weights="queries")),
        "rotation, 3 bits": keys(RotationCode(bits=3)),
    }


def token_bytes(policy: ShadowKV, config: ModelConfig, tokens: int) -> tuple[float, float | None]:
    """Return the bytes of a token's keys in bfloat16: its own, and its share of what all tokens share.

    The second is None if the basis has another number of columns for each prompt.
    """
    if isinstance(policy, AllottedKV):
        return policy.allot.total / 8, None
    codec, sizes = policy.resolve(config, tokens).codec, Sizes(config.kv_heads, config.head_dim, "bfloat16")
    own = codec.read_bytes(sizes) * (1 if codec.joint else config.kv_heads)
    return own, (codec.nbytes(tokens, 1, sizes) - own * tokens) / tokens


def summary(
    config: ModelConfig, policies: dict[str, ShadowKV], found: list[Found], tokens: int
) -> list[dict[str, Any]]:
    """Return one row for each policy. It is compared with the weighted transform code of as many bytes, if any."""
    kls = {
        name: {place: record["kl"] for place, record in own.items()} for name, own in zip(policies, found, strict=True)
    }
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
    parser.add_argument("--texts", default=",".join(TASKS), help="kinds of text, comma list")
    parser.add_argument("--only", default="", help="rows whose name holds one of these, comma list")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON after every prompt")
    args = parser.parse_args()
    TASK_TABLE.update(
        {kind: functools.partial(agreement, source=functools.partial(prose_tokens, kind=kind)) for kind in TASKS[2:]}
    )
    params = jshadow.load(args.model, "float32")
    only = args.only.split(",")
    policies = {name: row for name, row in rows_of(params.config).items() if any(text in name for text in only)}
    setup, texts = Setup(params, "resident", None, {}), args.texts.split(",")
    for found in records(setup, list(policies.values()), texts, [args.length], args.samples):
        rows = summary(params.config, policies, found, args.length)
        if args.json:
            print(json.dumps(rows), flush=True)
    if args.json:
        return
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
