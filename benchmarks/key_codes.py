"""Compare variants of the transform code at equal device bytes: `python benchmarks/key_codes.py MODEL [--json]`.

The first table has the divergence from full attention on documentation, a Bible and source code (the agreement tasks of
`jshadow eval`). All variants run on the same prompts. A variant that is not a codec of the library rounds the keys
once, at the end of the prefill, and keeps the rounded keys exactly.

The second table is about the decode steps of one prompt. For caches of several sizes (`ShadowKV.pool`) it has the share
of selected chunks that were in the cache, and the bytes that a step fetched. It also has the share of selected chunks
that the query of the previous step would have fetched.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

import jshadow
from jshadow.cache.accounting import FETCH_QUANTUM
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.evaluation.metrics import mean_stderr
from jshadow.evaluation.plan import EvalSettings, Setup, plan_tasks
from jshadow.evaluation.runner import run_cases
from jshadow.evaluation.tasks import TASKS as TASK_TABLE
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Choice, ExactKeys, Landmarks, LowRank, TransformCode, Values
from jshadow.policies.shadowkv.key_codecs import ExactCodec, KeyCode, Profile, TransformCodec
from jshadow.policies.shadowkv.key_codecs.transform import profile_of

TASKS = ("agreement", "agreement_bible", "agreement_code")
BITS = 512  # bits of a token's keys, as many as rank 32 takes in 16-bit numbers
COMMON: dict[str, Any] = {"budget": 256, "outlier_chunks": 8}
PACKED: dict[str, Any] = {**COMMON, "landmarks": Landmarks(tokens=2, dtype="int4"), "values": Values("int4")}
POOLS = (0, 1.5, 2, 4)
CHUNKS = {"landmarks": Landmarks(dtype="int4")}  # one landmark for each chunk


@dataclasses.dataclass(frozen=True)
class Rounded(ExactCodec):
    """Keeps keys exactly, after rounding them as a variant of `TransformCodec` would.

    Attributes:
        profile: numbers of a token in 8, 4 and 2 bits.
        idea: "whole" (no change), "per_head" (a basis for each head), "middle" (the basis of the middle half of the
            prompt) or "scale" (a scale for each token).
    """

    profile: Profile = (16, 64, 64)
    idea: str = "whole"

    def encode(self, k_pre: Array, lengths: Array, units: int, chunk: int, weights: Array | None = None) -> KeyCode:
        """Round the keys k_pre [B, S, h_kv, d], then encode them as `ExactCodec` does."""
        batch, length, heads, dim = k_pre.shape
        keys, codec = k_pre, TransformCodec(self.profile)
        if self.idea == "per_head":
            keys = k_pre.swapaxes(1, 2).reshape(batch * heads, length, 1, dim)
        near = keys[:, length // 4 : 3 * length // 4] if self.idea == "middle" else keys
        ends = jnp.full(len(near), near.shape[1]) if self.idea == "middle" else jnp.repeat(lengths, len(near) // batch)
        right = codec.encode(near, ends, near.shape[1], 1).right
        rounded = rebuilt(codec, keys, right)
        if self.idea == "scale":
            off = jnp.full(keys.shape[:2], jnp.inf)
            for power in range(-5, 11):  # 16 scales, which take four bits for each token
                step = right.step * 2.0 ** (power / 2.5)
                tried = rebuilt(codec, keys, right.replace(step=step))
                error = ((tried.swapaxes(1, 2) - keys) ** 2).sum(axis=(2, 3))
                rounded = jnp.where((error < off)[:, None, :, None], tried, rounded)
                off = jnp.minimum(off, error)
        rounded = rounded.reshape(batch, heads, length, dim).swapaxes(1, 2).astype(k_pre.dtype)
        return super().encode(rounded, lengths, units, chunk)


def rebuilt(codec: TransformCodec, keys: Array, right: Any) -> Array:
    """Encode keys [rows, S, heads, d] with the basis `right` and decode them: [rows, heads, S, d]."""
    return codec.expand(codec.project(keys, right).swapaxes(1, 2), right)


@dataclasses.dataclass(frozen=True)
class Idea(ShadowKV):
    """ShadowKV with the codec `Rounded`."""

    idea: str = "whole"
    profile: Profile = (16, 64, 64)

    @property
    def codec(self) -> Any:
        """The codec of the keys."""
        return Rounded(self.profile, self.idea)


def ideas(params: Any) -> dict[str, ShadowKV]:
    """Return the compared policies by name."""
    config = params.config
    transform: dict[str, Any] = {**PACKED, "keys": TransformCode()}
    exact: dict[str, Any] = {**PACKED, "keys": ExactKeys()}
    head = profile_of(config.head_dim, BITS / config.kv_heads)
    profile = profile_of(config.key_columns, BITS)
    return {
        "rank 32, landmarks of 8, all 16 bits": ShadowKV(rank=32, **COMMON),
        f"transform {profile}": ShadowKV(**transform),
        "the same code, kept exactly (a check)": Idea(**exact, profile=profile),
        f"a basis for each head {head}": Idea(**exact, idea="per_head", profile=head),
        "a scale for each token (16, 64, 60)": Idea(**exact, idea="scale", profile=(16, 64, 60)),
        "half of the outliers by the code": ShadowKV(**transform, choice=Choice(outlier_rule="both")),
        "keys weighed by queries": ShadowKV(**transform | {"keys": TransformCode(weights="queries")}),
        "rank 32, keys weighed by queries": ShadowKV(rank=32, **COMMON, keys=LowRank(weights="queries")),
        "the basis of the middle half": Idea(**exact, idea="middle", profile=profile),
        "a second round of selection": ShadowKV(**transform, choice=Choice(rounds=2)),
        "a second round, rank 32": ShadowKV(rank=32, **COMMON, choice=Choice(rounds=2)),
        "budget 512": ShadowKV(**transform | {"budget": 512}),
        "4/3 bits (4, 40, 32), landmarks of 8": ShadowKV(**PACKED | CHUNKS, keys=TransformCode(bits=4 / 3)),
        "4/3 bits (4, 40, 32), keys weighed": ShadowKV(
            **PACKED | CHUNKS, keys=TransformCode(bits=4 / 3, weights="queries")
        ),
    }


# Divergence


def divergences(
    params: Any, policies: dict[str, ShadowKV], lengths: list[int], samples: int, console: Console
) -> list[dict[str, Any]]:
    """Return one row for each policy: its mean KL over all prompts and for each kind of text.

    `lower_on` is the number of prompts on which its KL is below that of the first policy.
    """
    setup = Setup(params, "resident", None, {})
    plans = plan_tasks(setup, TASKS, lengths, list(policies.values()), EvalSettings(samples=samples))
    plans.sort(key=lambda plan: plan.length)  # tasks of one length share compiled programs
    found: list[dict[tuple, dict[str, Any]]] = [{} for _ in policies]
    for done, plan in enumerate(plans):
        run_policies = [entry.policy for entry in plan.entries if entry.policy is not None]  # full attention first
        for index in range(samples):
            _, *records = (record for [record] in run_cases(setup, plan, [index], run_policies))
            for records_of_policy, record in zip(found, records, strict=True):
                records_of_policy[plan.task, plan.length, index] = record
            console.print(f"{plan.task}, {plan.length} tokens, prompt {index + 1}: {done + 1} of {len(plans)} tasks")
        if done % len(TASKS) == len(TASKS) - 1:
            jax.clear_caches()
    rows = []
    for name, own_records in zip(policies, found, strict=True):
        kl = {place: record["kl"] for place, record in own_records.items()}
        mean, error = mean_stderr(list(kl.values()))
        rows.append(
            {
                "idea": name,
                "prompts": len(kl),
                "kl": mean,
                "kl_stderr": error,
                "of_first": mean / float(np.mean([record["kl"] for record in found[0].values()])),
                "lower_on": sum(kl[place] < found[0][place]["kl"] for place in kl),
                "top1": float(np.mean([record["score"] for record in own_records.values()])),
                "by_text": {task: float(np.mean([kl[place] for place in kl if place[0] == task])) for task in TASKS},
                "attended_tokens": float(np.mean([record["attended_tokens"] for record in own_records.values()])),
            }
        )
    return rows


# Hits of a cache of recent chunks, and of the previous query


def decoded(params: Any, tokens: np.ndarray, policy: ShadowKV, steps: int, fetch: str) -> Iterator[KVState]:
    """Prefill all but the last `steps` tokens. Yield the state after each of these tokens."""
    prompt = len(tokens) - steps
    _, state = decode.prefill(
        params, tokens[None, :prompt], np.array([prompt], np.int32), policy, capacity=len(tokens), fetch=fetch
    )
    for token in tokens[prompt:]:
        _, state = decode.decode_step(params, np.array([token], np.int32), state)
        yield state


def selections(params: Any, tokens: np.ndarray, policy: ShadowKV, steps: int) -> list[np.ndarray]:
    """Return the chunks that each of the last `steps` tokens selects, int [layers, h_kv, k], with -1 as padding."""
    states = decoded(params, tokens, policy, steps, "resident")
    return [np.stack([np.asarray(layer.live.resident[0]) for layer in state.layers]) for state in states]


def pooled(params: Any, tokens: np.ndarray, policy: ShadowKV, steps: int) -> tuple[float, float]:
    """Decode the last `steps` tokens with values in host memory, and count without the first of these steps.

    Returns:
        The share of selected chunks that the policy's cache held, and the bytes that a step fetched.
    """
    counts = [
        [int(getattr(state.counters, name)[0]) for name in ("selected", "hits", "fetched")]
        for state in decoded(params, tokens, policy, steps, "zero_copy")
    ]
    selected, hits, fetched = (last - first for first, last in zip(counts[0], counts[-1], strict=True))
    return hits / selected, fetched * FETCH_QUANTUM / (steps - 1)


def foreseen(held: list[np.ndarray], wide: list[np.ndarray]) -> float:
    """Return the share of selected chunks that the previous step selected with a larger budget."""
    now, before = np.stack(held[1:]), np.stack(wide[:-1])
    found = (now[..., :, None] == before[..., None, :]).any(axis=-1) & (now >= 0)
    return float(found.sum() / (now >= 0).sum())


def reuse(params: Any, length: int, steps: int = 64) -> list[dict[str, Any]]:
    """Return one row for each kind of text: the hits of pools, and of fetching for the previous query."""
    packed: dict[str, Any] = PACKED | {"keys": TransformCode()}
    rows = []
    for task in TASKS:
        case = TASK_TABLE[task](params.tokenizer, length, 0.5, 0)
        tokens = np.array([*case.prompt, *case.forced[:steps]], np.int32)
        selected = selections(params, tokens, ShadowKV(**packed), steps)
        row: dict[str, Any] = {"text": task, "tokens": length}
        for size in POOLS:
            hits, moved = pooled(params, tokens, ShadowKV(**packed, pool=size), steps)
            row |= {f"hits, pool={size:g}": hits, f"bytes a step, pool={size:g}": moved}
        for more in (1.5, 2):
            wide = selections(params, tokens, ShadowKV(**packed | {"budget": round(more * COMMON["budget"])}), steps)
            row[f"the query before, {more:g} budgets"] = foreseen(selected, wide)
        rows.append(row)
    return rows


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="2048,4096")
    parser.add_argument("--samples", type=int, default=2, help="prompts of each kind of text and length")
    parser.add_argument("--only", default="", help="ideas whose name holds one of these, comma list; no reuse then")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    params, lengths = jshadow.load(args.model, "float32"), [int(length) for length in args.lengths.split(",")]
    console = Console(stderr=True)
    wanted = {name: idea for name, idea in ideas(params).items() if any(text in name for text in args.only.split(","))}
    found = {"divergence": divergences(params, wanted, lengths, args.samples, console)}
    if not args.only:
        found["reuse"] = [row for length in lengths for row in reuse(params, length)]
    if args.json:
        print(json.dumps(found))
        return
    for name, rows in found.items():
        table = Table(*rows[0], title=name)
        for row in rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        Console().print(table)


if __name__ == "__main__":
    main()
