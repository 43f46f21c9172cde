"""`verify=True`: a sound run passes and counts its steps; every kind of broken offload is caught and named."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, setting
from few import slow

import jshadow
from jshadow.cache import offload
from jshadow.cache.records import HostArray
from jshadow.engine import decode
from jshadow.engine.verify import Verifier, resident_twin
from jshadow.errors import ConfigError, StateMismatch, VerificationError

SHADOW = jshadow.ShadowKV(rank=12, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=2)


@functools.cache
def prefilled_pair(name, dtype, fetch):
    policy = setting(name, "restricted")
    options = {"capacity": CAPACITY, "fetch": [fetch, "resident"]}
    return [state for _, state in decode.prefill_many(model(TINY, dtype), PROMPT, LENGTHS, [policy] * 2, **options)]


def pair(name="shadowkv", dtype="float32", fetch="device_put"):
    return tuple(state.fork() for state in prefilled_pair(name, dtype, fetch))


SOUND = [("omnikv", "float32"), ("specache", "float32"), ("shadowkv_transform", "bfloat16")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), SOUND)
def test_a_sound_run_passes(name, dtype):
    """Ragged turns, then steps with a row at rest; the logits are those of an ordinary run."""
    state, resident = pair(name, dtype)
    params, plain = model(TINY, dtype), state.fork()
    verifier = Verifier(params, state, resident)
    lengths = np.array([7, 0, 4])
    _, state = verifier.extend(STEPS[:, :7], lengths, state)
    _, plain = decode.extend(params, STEPS[:, :7], lengths, plain)
    for i in range(7, 10):
        active = np.array([True, i != 8, True])
        logits, state = verifier.step(STEPS[:, i : i + 1], active.astype(np.int32), state)
        want, plain = decode.decode_step(params, STEPS[:, i], plain, active=active)
        logits, want = np.asarray(logits), np.asarray(want)
        np.testing.assert_allclose(logits[active], want[active], atol=1e-4 if dtype == "float32" else 0.12)
    assert verifier.steps == 3 + -(-7 // min(7, *(spec.policy.reads.piece for spec in state.specs)))


def spoil(state, layer, change):
    layers = list(state.layers)
    layers[layer] = change(layers[layer])
    return state.replace(layers=tuple(layers))


def frozen(name, change):
    return lambda layer: layer.replace(frozen=layer.frozen.replace(**{name: change(getattr(layer.frozen, name))}))


def live(name, change):
    tree = jax.tree.map
    return lambda layer: layer.replace(live=layer.live.replace(**{name: tree(change, getattr(layer.live, name))}))


def placed(change):
    """A change in NumPy, for an array of any memory."""
    return lambda leaf: jax.device_put(np.array(change(np.array(leaf))), leaf.sharding)


def host(change):
    def changed(layer):
        part = layer.host.prompt
        return layer.replace(host=layer.host.replace(prompt=HostArray(placed(change)(part.array), part.memory)))

    return changed


def with_flipped_bit(rows):
    rows.view(np.uint32)[0, 1, 3, 5] ^= 1
    return rows


def turned(rows):
    rows[0, 1] = -rows[0, 1]
    return rows


def larger(leaf):
    return leaf * np.float32(1.01)


SELECTED = "step 0, layer 0, row 0, head 0: selected chunks differ"
FAULTS = [
    ("device_put", 1, 1, host(turned), r"step 1, layer 1, row 0, head 1: fetched values of chunk \d+ differ"),
    ("device_put", 0, 0, frozen("landmarks", placed(lambda x: x[:, :, ::-1])), SELECTED),
    ("device_put", 0, 1, frozen("right", placed(larger)), "step 0, layer 1, row 0, head .*keys differ"),
    ("device_put", 0, 1, live("window", placed(larger)), "step 0, layer 1, row 0, head .*attention outputs differ"),
    # the resident run keeps no rows, so it rebuilds the key of a chunk that stays
    slow(("zero_copy", 1, 1, live("keys", placed(np.negative)), r"step 1, layer 1, row 0, head \d: keys differ")),
]


@pytest.mark.parametrize(("fetch", "steps", "layer", "change", "told"), FAULTS)
def test_what_changes_later_is_found_in_the_step(fetch, steps, layer, change, told):
    state, resident = pair(fetch=fetch)
    verifier = Verifier(model(), state, resident)
    assert fetch != "zero_copy" or all(layer.live.keys is None for layer in verifier.twin.layers)
    for step in range(steps):
        _, state = verifier.step(STEPS[:, step : step + 1], [1, 1, 1], state)
    with pytest.raises(VerificationError, match=told):
        verifier.step(STEPS[:, steps : steps + 1], [1, 1, 1], spoil(state, layer, change))


def test_a_flipped_bit_in_host_memory_is_found_at_once():
    state, resident = pair()
    with pytest.raises(VerificationError, match=r"prefill, layer 2, row 0, KV head 1: values of chunk 3 "):
        Verifier(model(), spoil(state, 2, host(with_flipped_bit)), resident)


def test_logits_are_compared_with_a_resident_run_of_its_own():
    state, resident = pair()
    verifier = Verifier(model(), state, resident)
    verifier.free = spoil(verifier.free, 0, live("window", placed(np.zeros_like)))
    with pytest.raises(VerificationError, match="step 0, last layer, row 0: logits differ"):
        verifier.step(STEPS[:, :1], [1, 1, 1], state)


@pytest.mark.slow
def test_generate_with_verify_counts_its_steps():
    prompt, turn = PROMPT[0, :61].tolist(), STEPS[0, :3].tolist()
    plain = jshadow.generate(model(), prompt, SHADOW, max_new_tokens=6, fetch="device_put")
    checked = jshadow.generate(model(), prompt, SHADOW, max_new_tokens=6, verify=True)
    assert checked.tokens == plain.tokens
    assert (plain.report.verified_steps, checked.report.verified_steps) == (None, 5)
    assert checked.report.fetch == "device_put"
    more = jshadow.generate(model(), turn, state=plain.state, max_new_tokens=3, verify=True)
    again = jshadow.generate(model(), turn, state=checked.state, max_new_tokens=3)
    assert more.tokens == again.tokens
    assert more.report.verified_steps == 1 + 2  # a piece of a turn, two steps


@pytest.mark.slow
def test_generate_with_verify_fails_where_the_gather_is_wrong(monkeypatch):
    """An offload that fetches its neighbor's chunk: fluent, and wrong."""
    plain = offload.gather

    def off_by_one(tier, ids, units):
        return plain(tier, ids + (tier.prompt.memory == "pinned_host"), units)

    monkeypatch.setattr(offload, "gather", off_by_one)
    policy = dataclasses.replace(SHADOW, budget=20)  # of no other test: what is compiled here is used nowhere else
    with pytest.raises(VerificationError, match=r"step 0, layer 0, row 0, head \d: fetched values of chunk \d+ differ"):
        jshadow.generate(model(), PROMPT[0, :61].tolist(), policy, max_new_tokens=4, verify=True)


def test_what_cannot_be_verified_and_where_a_twin_lies():
    with pytest.raises(ConfigError, match="fetch must offload"):
        jshadow.generate(model(), [1, 2, 3], SHADOW, max_new_tokens=2, fetch="resident", verify=True)
    state, resident = pair()
    with pytest.raises(StateMismatch, match="must be offloaded"):
        Verifier(model(), resident, resident.fork())
    twin = resident_twin(state)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(twin)} == {"device"}
    assert twin.fetch == "resident"
