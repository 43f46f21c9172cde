"""Saved states: what is loaded is the state that was saved, bit for bit and in the same memories, and goes on alike."""

import dataclasses
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, STEPS, TINY, mode_of, model, prefilled, random_tokens, run_steps, setting
from safetensors import safe_open
from small_state import LENGTHS_SMALL, POLICY, SMALL, small
from tiny_text import byte_tokenizer

from jshadow import load_state, save_state
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.saved.state import bare, cache_fills, places, read_state_info
from jshadow.errors import CheckpointError, PromptError, StateMismatch
from jshadow.policies import POLICIES, Full
from jshadow.policies.settings import dotted_settings
from jshadow.weights.params import Params, init_params

BATCH = len(LENGTHS)
ACTIVE = np.array([[True, True], [False, True], [True, False]])
slow = pytest.mark.slow
# Every registered policy, and each variant whose state has other arrays.
VARIANTS = ("shadowkv_transform", "shadowkv_plus_transform", "shadowkv_rotation", "shadowkv_plus_channel")
NAMES = (*POLICIES, *VARIANTS, "dense_first", "pyramid", "probe")
QUICK = {("full", "resident"), ("shadowkv", "device_put")}


def decoded(name: str = "full", fetch: str = "resident"):
    """The restricted state after two steps, in each of which one row idles."""
    return run_steps(model(), prefilled(name, "restricted", fetch)[1], STEPS[:, :2], ACTIVE)[1]


def given(name: str):
    """What `load_state` must be told: a policy that is not in POLICIES."""
    return None if name in POLICIES else setting(name, "restricted")


def assert_same(mine, theirs, *, stepped: bool = False) -> None:
    """Same structure and static fields; every leaf with the same bits, dtype, shape, device and memory kind.

    A loaded state's cache of selected chunks is empty. After steps it may hold less, which costs hits and bytes.
    """
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    fills, others = cache_fills(mine), places(theirs)
    free = set(fills) | ({"counters.hits", "counters.fetched"} if stepped and fills else set())
    for name, a in places(mine).items():
        b = others[name]
        assert getattr(a, "memory", None) == getattr(b, "memory", None), name
        a, b = bare(a), bare(b)
        assert (a.dtype, a.shape, a.sharding, a.weak_type) == (b.dtype, b.shape, b.sharding, b.weak_type), name
        if name not in free:
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), name
        elif not stepped:
            assert (np.asarray(a) == fills[name]).all(), name


@pytest.mark.parametrize(
    ("name", "fetch"),
    [pytest.param(name, mode_of(name), marks=() if (name, mode_of(name)) in QUICK else slow) for name in NAMES],
)
def test_a_loaded_state_goes_on_like_the_saved_one(tmp_path, name, fetch):
    state = decoded(name, fetch)
    save_state(tmp_path / "state", state, model())
    loaded = load_state(tmp_path / "state", model(), given(name))
    assert loaded.fetch == fetch
    assert loaded.lengths.tolist() == [63, 28, 6]
    assert_same(loaded, state)
    logits, after = run_steps(model(), state, STEPS[:, 2:5])
    compiled = decode._step._cache_size()
    loaded_logits, loaded_after = run_steps(model(), loaded, STEPS[:, 2:5])
    assert decode._step._cache_size() == compiled
    np.testing.assert_array_equal(loaded_logits, logits)
    assert_same(loaded_after, after, stepped=True)


def prefill_small(params: Params | None = None, policy=POLICY, capacity=16) -> KVState:
    """A state of the smallest model, or of one like it."""
    tokens, sizes = random_tokens(2, 13, config=SMALL), {"capacity": capacity, "fetch": "device_put"}
    return decode.prefill(params or small()[0], tokens, LENGTHS_SMALL, policy, **sizes)[1]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow)])
def test_sixteen_bit_states(tmp_path, dtype):
    params = init_params(SMALL, dtype=dtype)
    state = prefill_small(params)
    save_state(tmp_path / "state", state, params)
    assert_same(load_state(tmp_path / "state", params), state)


@slow
def test_a_step_does_not_compile_anew_for_a_loaded_state(tmp_path):
    """The other way round: the first step that is ever compiled for a policy is a loaded state's."""
    params = init_params(dataclasses.replace(SMALL, vocab_size=17))  # of no other test
    state, before = prefill_small(params), decode._step._cache_size()
    save_state(tmp_path / "state", state, params)
    loaded = load_state(tmp_path / "state", params, POLICY)  # not resolved, and yet the same
    for one in (loaded.fork(), state, load_state(tmp_path / "state", params)):
        for _ in range(2):
            _, one = decode.decode_step(params, [1, 2], one)
        assert decode._step._cache_size() == before + 1


def test_the_file_is_safetensors_with_a_tensor_for_every_place(tmp_path):
    state = decoded("shadowkv", "device_put")
    save_state(tmp_path / "state", state, model(), tokens=[range(n) for n in state.lengths.tolist()])
    with safe_open(tmp_path / "state", "numpy") as file:
        names = set(file.keys())
        host = file.get_tensor("layers.1.host.prompt")
        assert file.get_tensor("tokens.2").tolist() == list(range(6))
        assert file.get_tensor("counters.steps").dtype == np.uint32
        assert file.get_tensor("layers.0.frozen.candidates").dtype == bool
    np.testing.assert_array_equal(host, state.layers[1].host.prompt.array)
    cache = {f"layers.{layer}.live.resident" for layer in range(TINY.num_layers)}
    assert names == set(places(state)) - cache | {f"tokens.{row}" for row in range(BATCH)}
    assert {"layers.2.frozen.left", "layers.2.live.window.k", "lengths"} <= names
    assert len(names) == len(jax.tree.leaves(state)) - len(cache) + BATCH


def test_tensors_are_aligned(tmp_path):
    """Readers that map a file take numbers from where they lie."""
    dtypes = {"a": bool, "b": jnp.bfloat16, "c": np.float32}
    fitted = {name: jax.device_put(np.ones(3, dtype)) for name, dtype in dtypes.items()}
    save_state(tmp_path / "state", decoded().replace(fitted=fitted), model())
    data = (tmp_path / "state").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    widths = {"F32": 4, "I32": 4, "U32": 4, "BF16": 2, "BOOL": 1}
    starts = {name: (info["data_offsets"][0], widths[info["dtype"]]) for name, info in header.items() if name[0] != "_"}
    assert {width for _, width in starts.values()} == {4, 2, 1}
    assert [name for name, (start, width) in starts.items() if start % width] == []


def test_rows_taken_and_inserted_keep_their_window(tmp_path):
    state = small()[1]
    one = decode.prefill(small()[0], random_tokens(1, 9, config=SMALL), [9], POLICY, capacity=16, fetch="device_put")[1]
    for changed in (state.take([1, 0]), state.insert(1, one), one):
        save_state(tmp_path / "state", changed, small()[0])
        loaded = load_state(tmp_path / "state", small()[0])
        assert jax.tree.structure(loaded) == jax.tree.structure(changed)
        theirs, fills = places(changed), cache_fills(changed)
        for name, mine in places(loaded).items():
            np.testing.assert_array_equal(bare(mine), fills.get(name, bare(theirs[name])))
    assert one.specs[0].window != state.specs[0].window


def test_fitted_arrays_come_back(tmp_path):
    basis = {
        "part": {"basis": np.arange(18, dtype=np.float32).reshape(3, 2, 3), "kept": np.array([[True, False]] * 3)},
        "none": None,
        "b.c": np.full(3, 3, np.int8),
        "empty": {},
    }
    basis = jax.device_put(basis)
    state = decoded().replace(fitted=basis)
    save_state(tmp_path / "state", state, model())
    loaded = load_state(tmp_path / "state", model())
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for mine, theirs in zip(jax.tree.leaves(loaded.fitted), jax.tree.leaves(basis), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(mine, theirs)
    first = read_state_info(tmp_path / "state")["fitted"]
    save_state(
        tmp_path / "state", state.replace(fitted=basis | {"b.c": jax.device_put(np.full(3, 4, np.int8))}), model()
    )
    assert first != read_state_info(tmp_path / "state")["fitted"] is not None


@pytest.mark.parametrize(
    ("fitted", "told"),
    [
        ({0: np.zeros(2, np.float32)}, "text keys"),
        ([np.zeros(2, np.float32)], "nested dict"),
        ({"a": np.zeros(2, np.float64)}, "dtypes"),
        ({"a.b": np.zeros(2, np.int32), "a": {"b": np.zeros(2, np.int32)}}, "distinct names"),
    ],
)
def test_fitted_arrays_that_no_file_can_hold_are_refused(tmp_path, fitted, told):
    with pytest.raises(CheckpointError, match=told):
        save_state(tmp_path / "state", decoded().replace(fitted=fitted), model())
    assert not list(tmp_path.iterdir())


def test_info(tmp_path):
    state = decoded("shadowkv", "device_put")
    tokens = [random_tokens(n, seed=n).tolist() for n in state.lengths.tolist()]
    save_state(tmp_path / "state", state, model(), tokens=tokens)
    info = read_state_info(tmp_path / "state")
    assert info["tokens"] == tokens
    assert info["lengths"] == state.lengths.tolist()
    assert info["policy"] == {"name": "shadowkv", "settings": dotted_settings(state.policy)}
    assert info["config"]["rope"]["theta"] == TINY.rope.theta
    assert info["weights"] == model().digest
    assert info["windows"] == [spec.window for spec in state.specs]
    assert (info["batch"], info["capacity"], info["dtype"], info["fetch"]) == (BATCH, CAPACITY, "float32", "device_put")
    assert (info["tokenizer"], info["fitted"], info["version"]) == (None, None, 3)
    assert info["nbytes"] == (tmp_path / "state").stat().st_size
    assert_same(load_state(tmp_path / "state", model()), state)
    save_state(tmp_path / "state", state, model())
    assert read_state_info(tmp_path / "state")["tokens"] is None


def test_saving_leaves_the_state_as_it_is(tmp_path):
    state = decoded("shadowkv", "device_put")
    before = jax.tree.map(np.array, state)
    save_state(tmp_path / "a", state, model())
    save_state(tmp_path / "b", state, model())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)
    run_steps(model(), state, STEPS[:, 2:3])


def test_a_consumed_state_is_refused(tmp_path):
    state = decoded()
    run_steps(model(), state, STEPS[:, 2:3])
    with pytest.raises(StateMismatch, match="consumed"):
        save_state(tmp_path / "state", state, model())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda rows: rows[:2], StateMismatch, r"\[63, 28, 6\] ids.*got \[63, 28\]"),
        (lambda rows: [rows[0][:-1], *rows[1:]], StateMismatch, r"got \[62, 28, 6\]"),
        (lambda rows: [rows[0], [*rows[1][:-1], 101], rows[2]], PromptError, r"tokens\.1 .*vocab_size=101.*got 101"),
    ],
)
def test_tokens_that_are_not_the_states_are_refused(tmp_path, change, error, told):
    state = decoded()
    rows = [[1] * n for n in state.lengths.tolist()]
    with pytest.raises(error, match=told):
        save_state(tmp_path / "state", state, model(), tokens=change(rows))
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_model_is_refused(tmp_path):
    other = init_params(dataclasses.replace(TINY, num_layers=2))
    with pytest.raises(StateMismatch, match="params"):
        save_state(tmp_path / "state", decoded(), other)


@dataclasses.dataclass(frozen=True)
class Impostor(Full):
    """Not Full, and yet called so."""


def test_a_policy_that_would_come_back_as_another_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="structure"):
        save_state(tmp_path / "state", prefill_small(policy=Impostor()), small()[0])
    assert not list(tmp_path.iterdir())


def test_the_file_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (calls.append("replace"), replace(path, to)))
    save_state(tmp_path / "state", decoded(), model())
    assert calls == [(tmp_path / "state").stat().st_ino, "replace", tmp_path.stat().st_ino]


@pytest.mark.parametrize("place", ["", "file/x"])
def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_state(tmp_path / place, decoded(), model())
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


def test_a_capacity_from_numpy_can_be_saved(tmp_path):
    save_state(tmp_path / "state", prefill_small(capacity=np.max(LENGTHS_SMALL) + 7), small()[0])
    assert load_state(tmp_path / "state", small()[0]).capacity == 20


def test_token_ids_that_are_no_lists(tmp_path):
    with pytest.raises(PromptError, match="a list of ids for each row"):
        save_state(tmp_path / "state", small()[1], small()[0], tokens=[3] * 13)
    assert not list(tmp_path.iterdir())


def test_rows_that_share_a_prompt_are_saved_one_by_one(tmp_path):
    params, shared = small()[0], small()[1].take([0]).share(2)
    with pytest.raises(StateMismatch, match=r"take\(\[i\]\)"):
        save_state(tmp_path / "state", shared, params)
    save_state(tmp_path / "state", shared.take([1]), params)
    assert load_state(tmp_path / "state", params).lengths.tolist() == [13]


# The digests of weights and tokenizers, by which a saved state knows its model


def test_the_digest_of_params_is_of_every_bit_name_and_dtype():
    params = init_params(TINY)
    assert params.digest == init_params(TINY).digest == model().digest
    assert params.digest is params.digest  # computed once
    flipped = jax.tree.map(lambda leaf: leaf, params.weights)
    kernel = np.array(flipped["layer_1"]["mlp"]["up"]["kernel"])
    kernel.view(np.uint32)[3, 5] ^= 1
    flipped["layer_1"]["mlp"]["up"]["kernel"] = jnp.asarray(kernel)
    renamed = {name.replace("layer_2", "layer_9"): leaf for name, leaf in params.weights.items()}
    bits = jax.tree.map(lambda leaf: np.asarray(leaf).view(np.int32), params.weights)
    embedding = params.weights["embed"]["embedding"]
    turned = params.weights | {"embed": {"embedding": embedding.reshape(embedding.shape[::-1])}}
    digests = {Params(weights, TINY).digest for weights in (params.weights, flipped, renamed, bits, turned)}
    assert len(digests) == 5


def test_the_digest_of_a_tokenizer_is_of_what_it_does():
    def digest(tokenizer) -> str | None:
        return Params(model().weights, TINY, tokenizer).tokenizer_digest

    first, used, other, extended = (byte_tokenizer() for _ in range(4))
    used.pad_token = used.eos_token
    padded = digest(used)
    used(["one", "and two"], padding="max_length", truncation=True, max_length=4)
    assert digest(used) == padded  # what a call leaves in the backend is no part of it
    other.chat_template += " "
    extended.add_tokens(["new"])
    assert digest(first) == digest(byte_tokenizer())
    assert len({digest(first), digest(other), digest(extended), digest(None)}) == 4
    assert digest(None) is None


class WithoutBackend:
    """What a tokenizer in plain Python has in common with the fast ones."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab, self.special_tokens_map, self.chat_template = vocab, {"eos_token": "b"}, None

    def get_vocab(self) -> dict[str, int]:
        return self.vocab


def test_a_tokenizer_without_backend_has_a_digest():
    digests = [
        Params({}, TINY, WithoutBackend(vocab)).tokenizer_digest
        for vocab in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})
    ]
    assert digests[0] == digests[1] != digests[2]
