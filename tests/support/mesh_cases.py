"""What the tests of meshes run in a process with four devices: a policy on a mesh beside the same on one device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from family_cases import family_config
from jax.sharding import Mesh

from jshadow import policies
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.speculation import PromptLookup
from jshadow.errors import JshadowError
from jshadow.evaluation.laws.law import TINY
from jshadow.generate import generate
from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.policies import Policy, Quest, RocketKV, ShadowKV, ShadowKVPlus
from jshadow.policies.shadowkv import ExactKeys
from jshadow.weights.params import Params, init_params, spread

CONFIG = dataclasses.replace(TINY, num_layers=2, q_heads=8, kv_heads=4, head_dim=16, vocab_size=96)
_TINY_HYBRID = family_config("qwen3_5")
HYBRID = dataclasses.replace(
    _TINY_HYBRID,
    q_heads=8,
    kv_heads=4,
    vocab_size=96,
    recurrent=dataclasses.replace(recurrent_of(_TINY_HYBRID), key_heads=4, value_heads=8),
)
_TINY_LFM2 = family_config("lfm2")
_FOUR_HEADS = {"key_heads": 4, "value_heads": 4, "key_dim": 12, "value_dim": 12}
CONVOLUTIONS = dataclasses.replace(
    _TINY_LFM2,
    q_heads=8,
    kv_heads=4,
    vocab_size=96,
    recurrent=dataclasses.replace(recurrent_of(_TINY_LFM2), **_FOUR_HEADS),
)
STATES = dataclasses.replace(
    family_config("nemotron_h"), vocab_size=96
)  # Mamba-2 with groups, and blocks without an MLP
SMALL: dict[str, Any] = dict(chunk_size=4, outlier_chunks=2, local_chunks=2, budget=16)
POLICIES: dict[str, Policy] = {
    "full": policies.Full(),
    "quest": Quest(budget=12, unit=4, dense_layers=1),
    "snapkv": policies.SnapKV(max_capacity_prompt=14, observation_window=5, kernel=3),
    "tova": policies.TOVA(kept=14),
    "keydiff": policies.KeyDiff(kept=14),
    "expected_attention": policies.ExpectedAttention(kept=14, sinks=2),
    "rocketkv": RocketKV(kept=21, budget=8, unit=4),
    "rocketkv_kvzip": RocketKV(kept=21, budget=8, unit=4, scores="kvzip"),
    "shadowkv": ShadowKV(rank=12, **SMALL),
    "packed": dataclasses.replace(ShadowKV.packed(), **SMALL),
    "shadowkv_plus": ShadowKVPlus(
        rank=12, **SMALL | {"local_chunks": 1}, extra_outlier_chunks=2, extend_piece=6, later_keys="projected"
    ),
    "plus_int4": dataclasses.replace(ShadowKVPlus.packed(), extra_outlier_chunks=2, extend_piece=6, **SMALL),
    "exact": ShadowKV(keys=ExactKeys(), **SMALL),
}
MESHES = {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "data2": {"data": 2}, "data2_tp2": {"data": 2, "tp": 2}}
CAPACITY = 112
PROMPT = np.random.default_rng(0).integers(0, 96, (2, 60)).astype(np.int32)
LENGTHS = np.array([60, 41], np.int32)
TURN = np.random.default_rng(5).integers(0, 96, (2, 9)).astype(np.int32)
STEPS = 4


def mesh_of(name: str) -> Mesh:
    """A mesh of the first devices, with only the axes that are split."""
    sizes = MESHES[name]
    count = int(np.prod(list(sizes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(list(sizes.values())), tuple(sizes))


@functools.cache
def model(mesh: str = "", left: str = "split", dtype: str = "float32", config: ModelConfig = CONFIG) -> Params:
    """The tiny model on one device, or on a mesh."""
    params = init_params(config, seed=1, dtype=dtype)
    return spread(params, mesh_of(mesh), left) if mesh else params


def start(params: Params, policy: Policy, fetch: str, **options: Any) -> tuple[np.ndarray, KVState]:
    """The logits and the state after the ragged prompt."""
    out, state = decode.prefill(params, PROMPT, LENGTHS, policy, capacity=CAPACITY, fetch=fetch, **options)
    return np.asarray(out), state


def selections(state: KVState) -> list[list[frozenset[int]]]:
    """The units that each layer's last query selected, for each row and head."""
    found = []
    for layer in state.layers:
        ids = next((getattr(layer.live, name) for name in ("resident", "selected") if hasattr(layer.live, name)), None)
        if ids is not None:
            rows = np.asarray(ids).reshape(-1, ids.shape[2])
            found.append([frozenset(int(x) for x in row if x >= 0) for row in rows])
    return found


def steps_of(params: Params, name: str, fetch: str) -> dict[str, Any]:
    """Logits, tokens, selections and counters of a prompt and some steps."""
    out, state = start(params, POLICIES[name], fetch)
    logits, chosen = [out], []
    for _ in range(STEPS):
        token = logits[-1].argmax(-1).astype(np.int32)
        out, state = decode.decode_step(params, token, state)
        logits.append(np.asarray(out))
        chosen.append(selections(state))
    names = [field.name for field in dataclasses.fields(state.counters)]
    counters = {name: np.asarray(getattr(state.counters, name)) for name in names}
    return {"logits": np.stack(logits), "chosen": chosen, "counters": counters}


@functools.cache
def alone(name: str, config: ModelConfig) -> dict[str, Any]:
    """The results of one device."""
    return steps_of(model(config=config), name, "resident")


def compare_steps(name: str, mesh: str, left: str, fetch: str, config: ModelConfig = CONFIG) -> dict[str, Any]:
    """The differences of a policy on a mesh to one device."""
    want, got = alone(name, config), steps_of(model(mesh, left, config=config), name, fetch)
    counted = ("steps", "attended", "selected", "hits")
    return {
        "logits": float(np.abs(want["logits"] - got["logits"]).max()),
        "tokens": bool((want["logits"].argmax(-1) == got["logits"].argmax(-1)).all()),
        "chosen": want["chosen"] == got["chosen"],
        "sets": sum(len(layer) for step in want["chosen"] for layer in step),
        "counters": [kind for kind in counted if not np.allclose(want["counters"][kind], got["counters"][kind])],
    }


def sinks_apart(name: str, mesh: str) -> float:
    """How far the logits of a model with attention sinks and experts on a mesh are from those on one device."""
    params, runs = init_params(family_config("gpt_oss"), seed=1), []
    for one in (params, spread(params, mesh_of(mesh))):
        out, state = start(one, POLICIES[name], "device_put")
        logits = [out]
        for column in range(STEPS):
            out, state = decode.decode_step(one, TURN[:, column], state)
            logits.append(np.asarray(out))
        runs.append(np.stack(logits))
    return float(np.abs(runs[0] - runs[1]).max())


def flow(params: Params, name: str, fetch: str) -> list[np.ndarray]:
    """Logits after extend, fork, take, insert, with_room, share and an insert that consumes."""
    policy, results = POLICIES[name], []

    def feed(state: KVState, column: int) -> KVState:
        out, state = decode.decode_step(params, TURN[: state.batch, column], state)
        results.append(np.asarray(out))
        return state

    _, state = start(params, policy, fetch, room=40)
    kept = state.fork()
    out, state = decode.extend(params, TURN, [9, 5], state)
    results.append(np.asarray(out))
    kept = feed(kept, 0)
    feed(kept.take([1]), 1)
    feed(kept.take([1, 0]), 1)
    _, one = decode.prefill(params, PROMPT[:1, :33], [33], policy, capacity=CAPACITY, fetch=fetch, room=40)
    inserted = feed(kept.insert(1, one), 2)
    feed(inserted.with_room(30), 3)
    feed(one.share(2), 4)
    last = inserted.insert(0, one, consume=True)
    results.append(np.asarray(last.room()))
    feed(last, 5)
    return results


@functools.cache
def flow_alone(name: str, config: ModelConfig) -> list[np.ndarray]:
    """The results of one device."""
    return flow(model(config=config), name, "resident")


def compare_flow(name: str, mesh: str, fetch: str, config: ModelConfig = CONFIG) -> list[float]:
    """The largest difference of each result of `flow` on a mesh to one device."""
    want, got = flow_alone(name, config), flow(model(mesh, config=config), name, fetch)
    return [float(np.abs(one - other).max()) for one, other in zip(want, got, strict=True)]


def text_of(work: Callable[[], Any]) -> str:
    """The text of the error that some work raises."""
    try:
        work()
    except JshadowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def both(mesh: str, work: Callable[[Params], Any]) -> tuple[Any, Any]:
    """What some work gives on one device, and on a mesh."""
    return work(model()), work(model(mesh))


def long_turn(name: str, mesh: str) -> float:
    """The largest difference in the logits of a turn that takes blocks."""
    tokens = np.random.default_rng(9).integers(0, 96, (2, 40)).astype(np.int32)

    def logits(params: Params) -> np.ndarray:
        _, state = start(params, POLICIES[name], "resident" if params is model() else "device_put")
        return np.asarray(decode.extend(params, tokens, [40, 23], state, logits="all")[0])

    one, other = both(mesh, logits)
    return float(np.abs(one - other)[np.arange(40) < np.array([[40], [23]])].max())


def refused(mesh: Any, policy: Policy, left: str = "split") -> str:
    """The error of a mesh (names of axes and sizes) or of a policy on it, as "type: message"."""
    axes, sizes = zip(*mesh, strict=True)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return text_of(lambda: start(spread(model(), Mesh(devices, axes), left), policy, "resident"))


def engine_answers(mesh: str) -> list[bool]:
    """Whether an engine on a mesh answers five prompts as `generate` does on one device."""
    from jshadow.serving import Engine, EngineOptions, Request, RowClass

    policy, rng = POLICIES["shadowkv"], np.random.default_rng(3)
    prompts = [rng.integers(0, 96, count).tolist() for count in (50, 33, 61, 20, 47)]
    options = EngineOptions(fetch="device_put")
    with Engine(model(mesh), policy, classes=[RowClass(64, 32, 2)], options=options) as engine:
        answers = engine.submit_all([Request(prompt, max_new_tokens=12) for prompt in prompts])
        got = [list(answer.result().tokens) for answer in answers]
    asked = {"max_new_tokens": 12, "capacity": 96, "fetch": "resident"}
    return [got[i] == list(generate(model(), prompt, policy, **asked).tokens) for i, prompt in enumerate(prompts)]


def sliding(mesh: str) -> float:
    """The largest difference in the logits of a model with sliding layers, in steps and in a turn."""
    config, outs = dataclasses.replace(CONFIG, sliding_window=12, sliding_layers=(0,)), []
    for params in (init_params(config, seed=1), spread(init_params(config, seed=1), mesh_of(mesh))):
        out, state = start(params, POLICIES["shadowkv"], "resident")
        first, state = decode.decode_step(params, TURN[:, 0], state)
        last, _ = decode.extend(params, TURN, [9, 5], state)
        outs.append(np.stack([out, np.asarray(first), np.asarray(last)]))
    return float(np.abs(outs[0] - outs[1]).max())


def speculated(name: str, mesh: str, config: ModelConfig = CONFIG) -> list[bool]:
    """Whether speculation on a mesh gives the tokens of plain decoding on it, and accepts some.

    The first prompt repeats five tokens, so that chunks have equal scores. One device may choose others of them.
    """
    prompts = [np.resize(PROMPT[0, :5], 40).tolist(), PROMPT[1, :33].tolist()]
    asked: dict[str, Any] = {"max_new_tokens": 16, "capacity": CAPACITY}
    params = model(mesh, config=config)
    plain = generate(params, prompts, POLICIES[name], fetch="device_put", **asked)
    lookup = PromptLookup(tokens=4, ngram=1)
    fast = generate(params, prompts, POLICIES[name], fetch="device_put", speculate=lookup, **asked)
    same = [one.tokens == other.tokens for one, other in zip(plain, fast, strict=True)]
    return [*same, sum(one.report.accepted_tokens or 0 for one in fast) > 0]


def verified(mesh: str) -> str:
    """The error of a verified generation on a mesh."""
    asked: dict[str, Any] = {"fetch": "device_put", "verify": True, "max_new_tokens": 4}
    return text_of(lambda: generate(model(mesh), PROMPT[0].tolist(), POLICIES["shadowkv"], **asked))
