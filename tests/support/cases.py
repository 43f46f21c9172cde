"""The tables that tests share: tiny models, and every policy in two settings.

The model, the ragged batch and the laws are `jshadow.evaluation.laws`. A registered policy is in POLICY_CASES
by itself, in the settings of its registration. The rows below are for variants, and for settings other than those.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from probe import Probe
from random_arrays import array

from jshadow.cache.state import KVState
from jshadow.evaluation.laws import Case, Subject, law
from jshadow.evaluation.laws.law import BATCH as BATCH
from jshadow.evaluation.laws.law import CAPACITY, TINY, offloads
from jshadow.evaluation.laws.law import FETCH_MODES as FETCH_MODES
from jshadow.evaluation.laws.law import LENGTHS as LENGTHS
from jshadow.evaluation.laws.law import PROMPT as PROMPT
from jshadow.evaluation.laws.law import STEPS as STEPS
from jshadow.evaluation.laws.law import model as model
from jshadow.evaluation.laws.law import random_tokens as random_tokens
from jshadow.evaluation.laws.law import run_steps as run_steps
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.policies import (
    KIVI,
    LESS,
    POLICIES,
    DenseFirst,
    InfLLM,
    OmniKV,
    Policy,
    Pyramid,
    Quantized,
    Quest,
    ShadowKV,
    ShadowKVPlus,
    SpeCache,
)
from jshadow.policies.registry import LAW_SETTINGS
from jshadow.policies.shadowkv import (
    Choice,
    ExactKeys,
    Landmarks,
    LowRank,
    Quirks,
    TransformCode,
    Values,
)

LLAMA3_ROPE = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=64)

CONFIGS = {
    "group2": dataclasses.replace(TINY, num_layers=2),
    "group1": dataclasses.replace(TINY, num_layers=2, q_heads=2, model_dim=48),
    "head_dim80": dataclasses.replace(TINY, num_layers=2, q_heads=4, kv_heads=1, head_dim=80),
    "tied": dataclasses.replace(TINY, num_layers=2, tie_embeddings=True, attention_bias=True),
    "llama3_rope": dataclasses.replace(TINY, num_layers=2, rope=LLAMA3_ROPE),
}


class PolicyCase(NamedTuple):
    """A policy in a setting that drops or approximates something here, and in the one that must not."""

    restricted: Policy
    lossless: Callable[[int, ModelConfig], Policy] | None


def lossless_of(policy: type[Policy]) -> Callable[[int, ModelConfig], Policy]:
    """The settings of a policy that equal full attention, as its registration has them."""
    name = next(kind.name for kind in policy.__mro__ if getattr(kind, "name", "") in LAW_SETTINGS)
    settings = LAW_SETTINGS[name].lossless
    assert settings is not None
    return lambda num_tokens, config: policy(**settings(num_tokens, config))


# Few outliers, so that most chunks are really selected, rebuilt and fetched.
SMALL: dict[str, Any] = dict(chunk_size=4, outlier_chunks=2, local_chunks=2)
QUIRKS = Quirks(score_dim=128, score_dtype="bfloat16", exact_preload=True, chunk_multiple=2)
PLUS: dict[str, Any] = dict(chunk_size=4, outlier_chunks=2, local_chunks=1, extra_outlier_chunks=2, extend_piece=6)


# Codes beyond the paper's, small enough that each loses something.
PACKED = Landmarks(tokens=2, dtype="int4")
TRANSFORM = TransformCode(profile=(3, 6, 8), weights="queries")


def codec_case(policy: type[ShadowKV], keys: Any, values: str, rounds: int = 1, **settings: Any):
    """A ShadowKV whose keys are in a code, by which outliers are chosen too, and whose values are packed.

    Its lossless setting has exact keys and values, and landmarks choose among all chunks.
    """

    def lossless(num_tokens: int, config: ModelConfig) -> Policy:
        whole = policy.lossless(num_tokens, config)
        return dataclasses.replace(whole, rank=None, keys=ExactKeys(), **settings)

    codes = {"keys": keys, "values": Values(values), "choice": Choice(rounds, outlier_rule="both")}
    return PolicyCase(policy(budget=16, **codes, **settings), lossless)


def shadowkv_case(policy: type[ShadowKV], **settings: Any) -> PolicyCase:
    """A ShadowKV that rebuilds a part of the keys roughly, and the same with everything kept."""

    def lossless(num_tokens: int, config: ModelConfig) -> Policy:
        return dataclasses.replace(policy.lossless(num_tokens, config), **settings)

    return PolicyCase(policy(rank=12, budget=16, **settings), lossless)


@dataclasses.dataclass(frozen=True)
class TaughtLESS(LESS):
    """LESS with random kernels of its own, as if it had been given learned ones: the laws hold for those too."""

    name = "taught_less"

    def kernels(self, spec, learned):
        """The same in all layers; large enough that a third of the attention goes to what was evicted."""
        return random_kernels(self, spec.kv_heads, spec.head_dim)


def random_kernels(policy: LESS, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """One layer's arrays."""
    shapes = policy.layer_shapes(kv_heads, head_dim)
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    rng = np.random.default_rng(23)
    return jax.tree.unflatten(
        tree, [array(np.float32(rng.standard_normal(shape) / shape[-2] ** 0.5)) for shape in leaves]
    )


def registered_case(policy: type[Policy]) -> PolicyCase:
    """A policy in the settings that its registration names."""
    registered = LAW_SETTINGS[policy.name]
    return PolicyCase(policy(**registered.small), lossless_of(policy) if registered.lossless else None)


# Every policy that is registered, a new file's too, and then what a row below says of it or of a variant.
POLICY_CASES = {name: registered_case(policy) for name, policy in POLICIES.items()} | {
    "less_taught": PolicyCase(
        TaughtLESS(heavy=6, recent=8, normalize=True, state_rank=4, hidden=16), lossless_of(TaughtLESS)
    ),
    "omnikv_window": PolicyCase(
        OmniKV(budget=9, filter_layers=(0,), selector="exp", observation_window=4), lossless_of(OmniKV)
    ),
    "kivi_1bit": PolicyCase(KIVI(bits=1, group=4, residual=12), lossless_of(KIVI)),
    "quantized_int4": PolicyCase(Quantized("int4"), None),
    "infllm_capped": PolicyCase(
        InfLLM(window=7, sinks=0, budget=9, unit=3, representatives=3, cached=12, fetched=3, query_block=5),
        lossless_of(InfLLM),
    ),
    # ShadowKV's options are too many for all combinations. These have each value of each option, and most pairs of
    # values: of the class, the code of keys, the bits of values, the landmarks, the choice of chunks and the quirks.
    "shadowkv": shadowkv_case(ShadowKV, **SMALL),
    "shadowkv_reference": shadowkv_case(ShadowKV, **SMALL, quirks=QUIRKS, keys=LowRank(weights="queries")),
    "shadowkv_plus": shadowkv_case(ShadowKVPlus, **PLUS),
    "shadowkv_transform": codec_case(ShadowKV, TRANSFORM, "int4", **SMALL, landmarks=PACKED),
    "shadowkv_plus_transform": codec_case(
        ShadowKVPlus,
        TRANSFORM,
        "int4",
        **PLUS,
        landmarks=dataclasses.replace(PACKED, levels=2, order=2),
        later_keys="projected",
    ),
    "shadowkv_two_rounds": codec_case(ShadowKV, TRANSFORM, "model", rounds=2, **SMALL, landmarks=PACKED),
    "shadowkv_plus_preload": codec_case(
        ShadowKVPlus,
        LowRank(weights="queries"),
        "int8",
        **PLUS,
        landmarks=Landmarks(tokens=1, levels=2, order=2),
        quirks=Quirks(exact_preload=True),
    ),
    "dense_first": PolicyCase(
        DenseFirst(SpeCache(bits=1, group=8, residual=8, fetched=6), layers=1),
        lambda num_tokens, config: DenseFirst(lossless_of(SpeCache)(num_tokens, config), layers=1),
    ),
    "quest_top_p": PolicyCase(Quest(budget=24, unit=4, dense_layers=0, top_p=0.3), lossless_of(Quest)),
    "pyramid": PolicyCase(
        Pyramid(DenseFirst(Quest(budget=12, unit=4, dense_layers=0), layers=1), steepness=4.0),
        lambda num_tokens, config: Pyramid(lossless_of(Quest)(num_tokens, config), steepness=1.0),
    ),
    "probe": PolicyCase(Probe(keep=3), lambda num_tokens, config: Probe(keep=-(-num_tokens // Probe.unit))),
}
# These keep nothing in host memory: the program is the same in all modes.
DEVICE_ONLY = tuple(name for name, case in POLICY_CASES.items() if not offloads(case.restricted))


# Where keys are rebuilt, zero_copy is another program than device_put. These cases run in it.
ZERO_COPY = ("shadowkv_plus", "shadowkv_transform", "shadowkv_plus_transform")


def mode_of(name: str) -> str:
    """The fetch mode of a case's tests. That the other modes agree is a law."""
    if name in DEVICE_ONLY:
        return "resident"
    return "zero_copy" if name in ZERO_COPY else "device_put"


POLICY_FETCHES = [(name, mode_of(name)) for name in POLICY_CASES]
LOSSLESS = [name for name, case in POLICY_CASES.items() if case.lossless is not None]
KINDS = ("restricted", "lossless")  # of a case's settings; not every case has lossless ones


def setting(name: str, kind: str, config: ModelConfig = TINY, capacity: int = CAPACITY) -> Policy:
    """The "restricted" or the "lossless" policy of a case."""
    case = POLICY_CASES[name]
    if kind == "restricted":
        return case.restricted
    assert case.lossless is not None, f"{name} claims no lossless settings"
    return case.lossless(capacity, config)


def case_of(name: str, fetch: str = "resident", kind: str = "restricted", **which: Any) -> Case:
    """A law's case: a policy's case in a fetch mode and a setting; `which`: a row, or a piece."""
    lossless = setting(name, "lossless") if POLICY_CASES[name].lossless else None
    subject = Subject(name, setting(name, "restricted"), lossless)
    return Case(subject, fetch, "small" if kind == "restricted" else kind, **which)


def prefilled(name: str, kind: str, fetch: str = "resident", dtype: str = "float32") -> tuple[Array, KVState]:
    """Logits and a fresh fork of the state of the ragged batch; the prefill itself runs once a process."""
    return law.prefilled(setting(name, kind), fetch, dtype)
