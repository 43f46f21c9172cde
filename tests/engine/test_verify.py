"""`verify=True`: a sound run passes and counts its steps; every kind of broken offload is caught and named."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, setting

import jshadow
from jshadow.cache import offload
from jshadow.cache.records import HostArray
from jshadow.engine import decode
from jshadow.engine.verify import Verifier, resident_twin
from jshadow.errors import ConfigError, StateMismatch, VerificationError

slow = pytest.mark.slow
SHADOW = jshadow.ShadowKV(rank=12, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=2)


@functools.cache
def prefilled_pair(name, dtype, fetch):
    policy = setting(name, "restricted")
    options = {"capacity": CAPACITY, "fetch": [fetch, "resident"]}
    return [state for _, state in decode.prefill_many(model(TINY, dtype), PROMPT, LENGTHS, [policy] * 2, **options)]


def pair(name="shadowkv", dtype="float32", fetch="device_put"):
    """An offloaded state and a resident one of the same prompt."""
    return tuple(state.fork() for state in prefilled_pair(name, dtype, fetch))


@slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in ("shadowkv", "kivi", "omnikv", "specache", "shadowkv_plus")),
        ("shadowkv_transform", "bfloat16"),
    ],
)
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
    """The state with `change` applied to one layer."""
    layers = list(state.layers)
    layers[layer] = change(layers[layer])
    return state.replace(layers=tuple(layers))


def with_values(layer, change):
    """The layer with its prompt's host rows changed in NumPy."""
    part = layer.host.prompt
    rows = np.array(part.array)
    change(rows)
    return layer.replace(
        host=layer.host.replace(prompt=HostArray(jax.device_put(rows, part.array.sharding), part.memory))
    )


def flip_bit(rows):
    rows.view(np.uint32)[0, 1, 3, 5] ^= 1


def test_a_flipped_bit_in_host_memory_is_found_at_once():
    state, resident = pair()
    broken = spoil(state, 2, lambda layer: with_values(layer, flip_bit))
    with pytest.raises(VerificationError, match=r"prefill, layer 2, row 0, KV head 1: values of chunk 3 "):
        Verifier(model(), broken, resident)


def test_rows_that_change_later_are_found_in_the_step():
    """Every value of one layer and head turns; the first step that fetches there says so."""
    state, resident = pair()
    verifier = Verifier(model(), state, resident)
    _, state = verifier.step(STEPS[:, :1], [1, 1, 1], state)

    def turn(rows):
        rows[0, 1] = -rows[0, 1]

    broken = spoil(state, 1, lambda layer: with_values(layer, turn))
    with pytest.raises(VerificationError, match=r"step 1, layer 1, row 0, head 1: fetched values of chunk \d+ differ"):
        verifier.step(STEPS[:, 1:2], [1, 1, 1], broken)


@slow
def test_a_kept_key_that_changes_is_found():
    """The resident run keeps no rows, so it rebuilds the key of a chunk that stays."""
    state, resident = pair(fetch="zero_copy")
    verifier = Verifier(model(), state, resident)
    assert all(layer.live.keys is None for layer in verifier.twin.layers)
    _, state = verifier.step(STEPS[:, :1], [1, 1, 1], state)
    broken = spoil(state, 1, lambda layer: layer.replace(live=layer.live.replace(keys=-layer.live.keys)))
    with pytest.raises(VerificationError, match=r"step 1, layer 1, row 0, head \d: keys differ"):
        verifier.step(STEPS[:, 1:2], [1, 1, 1], broken)


def test_a_wrong_selection_is_found():
    state, resident = pair()
    verifier = Verifier(model(), state, resident)

    def shuffle(layer):
        frozen = layer.frozen
        return layer.replace(frozen=frozen.replace(landmarks=frozen.landmarks[:, :, ::-1]))

    with pytest.raises(VerificationError, match=r"step 0, layer 0, row 0, head 0: selected chunks differ"):
        verifier.step(STEPS[:, :1], [1, 1, 1], spoil(state, 0, shuffle))


def test_spoilt_factors_and_windows_are_found():
    for change, name in (
        (lambda layer: layer.replace(frozen=layer.frozen.replace(right=layer.frozen.right * 1.01)), "keys differ"),
        (
            lambda layer: layer.replace(
                live=layer.live.replace(window=jax.tree.map(lambda x: x * 1.01, layer.live.window))
            ),
            "attention outputs differ",
        ),
    ):
        state, resident = pair()
        verifier = Verifier(model(), state, resident)
        with pytest.raises(VerificationError, match=f"step 0, layer 1, row 0, head .*{name}"):
            verifier.step(STEPS[:, :1], [1, 1, 1], spoil(state, 1, change))


def test_logits_are_compared_with_a_resident_run_of_its_own():
    state, resident = pair()
    verifier = Verifier(model(), state, resident)
    layers = list(verifier.free.layers)
    window = jax.tree.map(lambda leaf: jnp.asarray(np.zeros_like(leaf)), layers[0].live.window)
    layers[0] = layers[0].replace(live=layers[0].live.replace(window=window))
    verifier.free = verifier.free.replace(layers=tuple(layers))
    with pytest.raises(VerificationError, match="step 0, last layer, row 0: logits differ"):
        verifier.step(STEPS[:, :1], [1, 1, 1], state)


@slow
def test_generate_with_verify_counts_its_steps():
    prompt = PROMPT[0, :61].tolist()
    plain = jshadow.generate(model(), prompt, SHADOW, max_new_tokens=6, fetch="device_put")
    checked = jshadow.generate(model(), prompt, SHADOW, max_new_tokens=6, verify=True)
    assert checked.tokens == plain.tokens
    assert (plain.report.verified_steps, checked.report.verified_steps) == (None, 5)
    assert checked.report.fetch == "device_put"
    more = jshadow.generate(model(), STEPS[0, :3].tolist(), state=plain.state, max_new_tokens=3, verify=True)
    again = jshadow.generate(model(), STEPS[0, :3].tolist(), state=checked.state, max_new_tokens=3)
    assert more.tokens == again.tokens
    assert more.report.verified_steps == 1 + 2  # a piece of a turn, two steps


@slow
def test_generate_with_verify_fails_where_the_gather_is_wrong(monkeypatch):
    """An offload that fetches its neighbor's chunk: fluent, and wrong."""
    plain = offload.gather

    def off_by_one(tier, ids, units):
        return plain(tier, ids + (tier.prompt.memory == "pinned_host"), units)

    monkeypatch.setattr(offload, "gather", off_by_one)
    policy = dataclasses.replace(SHADOW, budget=20)  # of no other test: what is compiled here is used nowhere else
    with pytest.raises(VerificationError, match=r"step 0, layer 0, row 0, head \d: fetched values of chunk \d+ differ"):
        jshadow.generate(model(), PROMPT[0, :61].tolist(), policy, max_new_tokens=4, verify=True)


def test_what_cannot_be_verified():
    with pytest.raises(ConfigError, match="fetch must offload"):
        jshadow.generate(model(), [1, 2, 3], SHADOW, max_new_tokens=2, fetch="resident", verify=True)
    _, resident = pair()
    with pytest.raises(StateMismatch, match="must be offloaded"):
        Verifier(model(), resident, resident.fork())


@slow
def test_a_twin_lies_on_the_device():
    state, _ = pair("shadowkv_plus")
    twin = resident_twin(state)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(twin)}
    assert kinds == {"device"}
    assert twin.fetch == "resident"
