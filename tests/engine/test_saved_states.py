"""Saved states and learned arrays: what is loaded is what was saved, bit for bit, also from a file in parts."""

import dataclasses
import functools
import json
import math
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, STEPS, TINY, mode_of, model, prefilled, random_tokens, run_steps, setting
from few import quick, slow
from less_arrays import SMALL as SMALL_LESS
from less_arrays import fitted_for
from safetensors import safe_open
from saved_cases import difference
from sealed import content_of, parts_of, seal
from small_state import LENGTHS_SMALL, POLICY, SMALL, equal, file_size_limit, save_small, small
from tiny_text import byte_tokenizer

from jshadow import load_fitted, load_state, save_fitted, save_state
from jshadow.cache.accounting import leaf_bytes
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.engine.saved import file as saved_file
from jshadow.engine.saved.file import Split, block_digests, cut, padded, read_slice, sizes, whole, within, without_zeros
from jshadow.engine.saved.fitted import FORMAT, read_fitted_info
from jshadow.engine.saved.state import StateContent, places, read_state_info
from jshadow.errors import CheckpointError, ConfigError, PromptError, StateMismatch
from jshadow.policies import POLICIES, Full, InfiniGen, Loki
from jshadow.policies.capabilities import Learns, with_fitted
from jshadow.policies.checks import reads_fitted
from jshadow.policies.settings import dotted_settings
from jshadow.weights.convert.safetensors_file import TensorFile, write_tensors
from jshadow.weights.params import Params, init_params

BATCH = len(LENGTHS)
ACTIVE = np.array([[True, True], [False, True], [True, False]])
# Every registered policy, and each variant whose state has other arrays.
VARIANTS = ("shadowkv_transform", "shadowkv_plus_transform", "shadowkv_two_rounds", "shadowkv_plus_preload")
NAMES = (*POLICIES, *VARIANTS, "dense_first", "pyramid", "probe")


def decoded(name: str = "full", fetch: str = "resident"):
    """The restricted state after two steps, in each of which one row idles."""
    return run_steps(model(), prefilled(name, "restricted", fetch)[1], STEPS[:, :2], ACTIVE)[1]


@pytest.mark.parametrize("name", quick(("full", "shadowkv"), NAMES))
def test_a_loaded_state_goes_on_like_the_saved_one(tmp_path, name):
    fetch = mode_of(name)
    state = decoded(name, fetch)
    save_state(tmp_path / "state", state, model())
    loaded = load_state(tmp_path / "state", model(), None if name in POLICIES else setting(name, "restricted"))
    assert (loaded.fetch, loaded.lengths.tolist()) == (fetch, [63, 28, 6])
    assert difference(loaded, state) == "none"
    logits, after = run_steps(model(), state, STEPS[:, 2:5])
    compiled = decode._step._cache_size()
    loaded_logits, loaded_after = run_steps(model(), loaded, STEPS[:, 2:5])
    assert decode._step._cache_size() == compiled
    np.testing.assert_array_equal(loaded_logits, logits)
    assert difference(loaded_after, after, stepped=True) == "none"


def test_a_file_takes_the_bytes_of_its_own_length(tmp_path):
    """A short prompt makes a small file at a large capacity."""
    params = init_params(dataclasses.replace(SMALL, context=4096))
    sizes = []
    for capacity in (16, 4096):
        state = prefill_small(params, capacity=capacity).take([0]).with_room(0)
        save_state(tmp_path / "state", state, params)
        assert equal(load_state(tmp_path / "state", params), state)
        sizes.append(StateContent.of(state, params, None, {}).nbytes)
    assert sizes[1] <= 1.15 * sizes[0]
    assert sum(map(leaf_bytes, jax.tree.leaves(state))) > 10 * sizes[1]


def test_what_is_not_stored_is_zero_to_the_bit():
    """Not a negative zero, nor a small number or NaN of any dtype; at least one index of an axis stays."""
    random = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int32", "uint8", "bool"):
        for _ in range(40):
            shape = tuple(random.integers(1, 7, random.integers(1, 5)))
            axis, value = random.integers(len(shape)), random.integers(0, 2, shape).astype(jnp.dtype(dtype))
            np.moveaxis(value, axis, 0)[random.integers(shape[axis]) :] = 0
            if dtype == "float32" and random.random() < 0.3:
                np.moveaxis(value, axis, 0)[-1].flat[0] = random.choice([-0.0, np.nan, 1e-45])
            kept = without_zeros(value)
            assert sum(a != b for a, b in zip(kept, shape, strict=True)) <= 1
            again = padded(whole(shape), kept, value.dtype, lambda place: value[within(place, whole(shape))])  # noqa: B023
            assert again.tobytes() == value.tobytes()
            smaller = np.moveaxis(value, axis, 0)[:-1]
            last_is_zero = not any(np.moveaxis(value, axis, 0)[-1].tobytes())
            assert math.prod(kept) <= (smaller.size if last_is_zero and len(smaller) else value.size)
    assert without_zeros(np.zeros((3, 5), np.uint8)) in ((1, 5), (3, 1))
    assert without_zeros(np.float32(0)[()].reshape(())) == ()


def prefill_small(params: Params | None = None, policy=POLICY, capacity=16, lengths=LENGTHS_SMALL) -> KVState:
    tokens, sizes = random_tokens(2, 13, config=SMALL), {"capacity": capacity, "fetch": "device_put"}
    return decode.prefill(params or small()[0], tokens, lengths, policy, **sizes)[1]


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_sixteen_bit_states(tmp_path, dtype):
    params = init_params(SMALL, dtype=dtype)
    state = prefill_small(params)
    save_state(tmp_path / "state", state, params)
    assert difference(load_state(tmp_path / "state", params), state) == "none"


@pytest.mark.slow
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
    """And with what `read_state_info` tells. Saving leaves the state as it is."""
    state, path = decoded("shadowkv", "device_put"), tmp_path / "state"
    before = jax.tree.map(np.array, state)
    save_state(path, state, model())
    assert read_state_info(path)["tokens"] is None
    tokens = [random_tokens(n, seed=n).tolist() for n in state.lengths.tolist()]
    for place in (tmp_path / "again", path):
        save_state(place, state, model(), tokens=tokens)
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)
    assert difference(load_state(path, model()), state) == "none"
    info = read_state_info(path)
    assert (info["tokens"], info["lengths"]) == (tokens, state.lengths.tolist())
    assert info["policy"] == {"name": "shadowkv", "settings": dotted_settings(state.policy)}
    assert (info["config"]["rope"]["theta"], info["weights"]) == (TINY.rope.theta, model().digest)
    assert info["windows"] == [spec.window for spec in state.specs]
    assert (info["batch"], info["capacity"], info["dtype"], info["fetch"]) == (BATCH, CAPACITY, "float32", "device_put")
    assert (info["tokenizer"], info["fitted"], info["version"]) == (None, None, 4)
    assert info["nbytes"] == path.stat().st_size
    with safe_open(path, "numpy") as file:
        names = set(file.keys())
        kept = file.get_tensor("layers.1.host.prompt")
        held = np.asarray(state.layers[1].host.prompt.array)
        assert kept.shape == (*held.shape[:2], 16, held.shape[3])  # 63 tokens in units of 4, of a capacity of 88
        np.testing.assert_array_equal(kept, held[:, :, :16])
        assert not held[:, :, 16:].any()
        assert file.get_tensor("tokens.2").tolist() == tokens[2]
        assert file.get_tensor("counters.steps").dtype == np.uint32
        assert file.get_tensor("layers.0.frozen.candidates").dtype == bool
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
    """Rows that share a prompt are saved one by one."""
    params, state = small()
    one = prefill_small(lengths=np.array([13, 9])).take([1])
    shared = state.take([0]).share(2)
    for changed in (state.take([1, 0]), state.insert(1, one), one, shared.take([1])):
        save_state(tmp_path / "state", changed, params)
        assert difference(load_state(tmp_path / "state", params), changed) == "none"
    assert one.specs[0].window != state.specs[0].window
    with pytest.raises(StateMismatch, match=r"take\(\[i\]\)"):
        save_state(tmp_path / "state", shared, params)


def test_fitted_arrays_come_back(tmp_path):
    kept = np.array([[True, False]] * 3)
    basis = {"part": {"basis": np.arange(18, dtype=np.float32).reshape(3, 2, 3), "kept": kept}, "none": None}
    basis = jax.device_put(basis | {"b.c": np.full(3, 3, np.int8), "empty": {}})
    state = decoded().replace(fitted=basis)
    save_state(tmp_path / "state", state, model())
    loaded = load_state(tmp_path / "state", model())
    assert difference(loaded, state) == "none"
    first = read_state_info(tmp_path / "state")["fitted"]
    other = basis | {"b.c": jax.device_put(np.full(3, 4, np.int8))}
    save_state(tmp_path / "state", state.replace(fitted=other), model())
    assert first != read_state_info(tmp_path / "state")["fitted"] is not None


@dataclasses.dataclass(frozen=True)
class Impostor(Full):
    """Not Full, and yet called so."""


def consumed():
    state = decoded()
    run_steps(model(), state, STEPS[:, 2:3])
    return state


ROWS = [[1] * n for n in (63, 28, 6)]
NUMBERS = np.zeros(2, np.int32)
AS_FITTED = [
    ({0: NUMBERS}, "text keys"),
    ([NUMBERS], "nested dict"),
    ({"a": np.zeros(2, np.float64)}, "dtypes"),
    ({"a.b": NUMBERS, "a": {"b": NUMBERS}}, "distinct names"),
]
AS_TOKENS = [
    (ROWS[:2], StateMismatch, r"\[63, 28, 6\] ids.*got \[63, 28\]"),
    ([ROWS[0][:-1], *ROWS[1:]], StateMismatch, r"got \[62, 28, 6\]"),
    ([ROWS[0], [*ROWS[1][:-1], 101], ROWS[2]], PromptError, r"tokens\.1 .*vocab_size=101.*got 101"),
    ([3] * 13, PromptError, "a list of ids for each row"),
]


@pytest.mark.parametrize(
    ("state", "options", "error", "told"),
    [
        *((lambda x=x: decoded().replace(fitted=x), {}, CheckpointError, told) for x, told in AS_FITTED),
        *((decoded, {"tokens": tokens}, error, told) for tokens, error, told in AS_TOKENS),
        (decoded, {"params": init_params(dataclasses.replace(TINY, num_layers=2))}, StateMismatch, "params"),
        (consumed, {}, StateMismatch, "consumed"),
        (lambda: prefill_small(policy=Impostor()), {"params": small()[0]}, CheckpointError, "structure"),
        (decoded, {"place": ""}, CheckpointError, "cannot be written"),
        (decoded, {"place": "file/x"}, CheckpointError, "cannot be written"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, state, options, error, told):
    (tmp_path / "file").write_text("")
    arguments = {"params": model(), "place": "state"} | options
    with pytest.raises(error, match=told):
        save_state(tmp_path / arguments.pop("place"), state(), **arguments)
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (calls.append("replace"), replace(path, to)))
    state = prefill_small(capacity=np.max(LENGTHS_SMALL) + 3)  # a capacity from NumPy can be saved
    save_state(tmp_path / "state", state, small()[0])
    assert calls == [(tmp_path / "state").stat().st_ino, "replace", tmp_path.stat().st_ino]
    assert load_state(tmp_path / "state", small()[0]).capacity == 16


# The digests of weights and tokenizers, by which a saved state knows its model


def test_the_digest_of_params_is_of_every_bit_name_and_dtype():
    params = init_params(TINY)
    assert params.digest == init_params(TINY).digest == model().digest
    assert params.digest is params.digest  # computed once
    flipped = jax.tree.map(np.array, params.weights)
    flipped["layer_1"]["mlp"]["up"]["kernel"].view(np.uint32)[3, 5] ^= 1
    renamed = {name.replace("layer_2", "layer_9"): leaf for name, leaf in params.weights.items()}
    bits = jax.tree.map(lambda leaf: np.asarray(leaf).view(np.int32), params.weights)
    embedding = np.asarray(params.weights["embed"]["embedding"])
    turned = params.weights | {"embed": {"embedding": embedding.reshape(embedding.shape[::-1])}}
    digests = {Params(weights, TINY).digest for weights in (params.weights, flipped, renamed, bits, turned)}
    assert len(digests) == 5


def digest(tokenizer) -> str | None:
    return Params({}, TINY, tokenizer).tokenizer_digest


def test_the_digest_of_a_tokenizer_is_of_what_it_does():
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

    special_tokens_map, chat_template = {"eos_token": "b"}, None

    def __init__(self, vocab: dict[str, int]) -> None:
        self.get_vocab = lambda: vocab


def test_a_tokenizer_without_backend_has_a_digest():
    digests = [digest(WithoutBackend(vocab)) for vocab in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})]
    assert digests[0] == digests[1] != digests[2]


# States in parts. Two threads stand for two processes; real ones write in `test_mesh.py`

TOKENS = [[3] * int(length) for length in LENGTHS_SMALL]
ANSWER_SECONDS = 60


class Pair:
    """Two threads that call the writing of parts together, as two processes do."""

    def __init__(self, patch):
        self.own, self.barrier, self.told = threading.local(), threading.Barrier(2), ["", ""]
        self.pool = ThreadPoolExecutor(2)
        patch.setattr(jax, "process_index", lambda: getattr(self.own, "number", 0))
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(saved_file, "exchange", self.exchange)

    def exchange(self, name, value, seconds):
        self.told[self.own.number] = value
        self.barrier.wait(ANSWER_SECONDS)
        told = list(self.told)
        self.barrier.wait(ANSWER_SECONDS)
        return told

    def call(self, work):
        def one(number):
            self.own.number = number
            try:
                return work(number)
            except CheckpointError as error:
                return f"{type(error).__name__}: {error}"

        return [future.result() for future in [self.pool.submit(one, number) for number in (0, 1)]]


def half(number, leaf):
    """What a process writes of a tensor: its part along the longest axis, or nothing of a row of one number."""
    axis = int(np.argmax(leaf.shape))
    middle = (leaf.shape[axis] + 1) // 2
    ends = [(0, size) for size in leaf.shape]
    ends[axis] = (0, middle) if number == 0 else (middle, leaf.shape[axis])
    part = np.asarray(leaf)[tuple(slice(*end) for end in ends)]
    return Split(leaf.shape, np.dtype(leaf.dtype), ((tuple(ends), part),) if part.size else ())


def write_halves(pair, path, first=3):
    """Write the small state in two parts. Return its bytes as both tell them, or the errors."""
    params, state = small()
    content = StateContent.of(state, params, [[first] * len(row) for row in TOKENS], {})

    def work(number):
        whole = content.index
        leaves = {name: leaf if name in whole else half(number, leaf) for name, leaf in content.leaves.items()}
        return saved_file.write_parts(path, content.record.texts(), leaves, whole)

    return pair.call(work)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """The index of a state in two parts, the bytes that both told, and the index of another run."""
    folder = tmp_path_factory.mktemp("halves")
    with pytest.MonkeyPatch.context() as patch:
        pair = Pair(patch)
        told = write_halves(pair, folder / "state")
        write_halves(pair, folder / "other")
    return folder / "state", told, folder / "other"


def copied(index, folder):
    parts = parts_of(index)[0].parent
    shutil.copytree(parts, folder / parts.name)
    return shutil.copy(index, folder / index.name)


def change_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def load(index):
    return load_state(index, small()[0])


# What is written and read


def test_the_parts_are_the_state(halves, tmp_path):
    """Saved again by one process, it is the file of one process: of the format and version that it always had."""
    path, told, _ = halves
    loaded, alone = load(path), save_small(tmp_path / "alone", first=3)
    assert equal(loaded, small()[1])
    save_state(tmp_path / "again", loaded, small()[0], tokens=TOKENS)
    assert (tmp_path / "again").read_bytes() == alone
    metadata = TensorFile(tmp_path / "alone").metadata
    assert (metadata["format"], metadata["version"]) == ("jshadow KV state", "4")
    assert {"run", "parts", "leaves"} & metadata.keys() == set()
    assert told == [path.stat().st_size + sum(part.stat().st_size for part in parts_of(path))] * 2
    # no number is in both parts
    index, parts = TensorFile(path), [TensorFile(part) for part in parts_of(path)]
    assert len(parts) == 2
    assert not parts[0].shapes.keys() & parts[1].shapes.keys()
    leaves = json.loads(index.metadata["leaves"])
    counts = [sum(math.prod(shape) for shape in part.shapes.values()) for part in parts]
    assert sum(counts) == sum(math.prod(shape) for key, (_, shape) in leaves.items() if key not in index.shapes)
    assert min(counts) > 0.4 * sum(counts)
    # the index tells of the state without the parts
    info, one = read_state_info(shutil.copy(path, tmp_path / "index")), read_state_info(tmp_path / "alone")
    assert (info["tokens"], info["lengths"]) == (one["tokens"], one["lengths"]) == (TOKENS, LENGTHS_SMALL.tolist())
    assert read_state_info(path)["nbytes"] == told[0]
    assert {key for key in info if info[key] != one[key]} == {"format", "version", "nbytes"}


def test_zeros_follow_the_end_of_an_array():
    array = np.arange(1, 13).reshape(3, 4)

    def read(place):
        return array[within(place, ((0, 3), (0, 4)))]

    for place, want in (
        (((1, 3), (2, 6)), [[7, 8, 0, 0], [11, 12, 0, 0]]),
        (((0, 1), (4, 6)), [[0, 0]]),
        (((0, 1), (0, 2)), [[1, 2]]),
    ):
        assert padded(place, (3, 4), array.dtype, read).tolist() == want
    assert sizes(cut(((0, 1), (4, 6)), (3, 4))) == (1, 0)


def test_only_the_blocks_of_a_slice_are_read_and_checked(tmp_path, monkeypatch):
    """Of tensors of each rank, and of the last also at random places."""
    random = np.random.default_rng(0)
    value = random.standard_normal((4, 6, 8), np.float32)
    others = {"a": random.random(7, np.float32), "b": random.random((2, 1, 3, 5), np.float32)}
    layout = {name: ("float32", one.shape) for name, one in (others | {"x": value}).items()}
    write_tensors(tmp_path / "file", layout, (others | {"x": value}).__getitem__)
    block = 64
    digests = block_digests(value, block)
    assert len(digests) == value.nbytes // block
    change_byte(tmp_path / "file", -1)  # in the last block
    file, checked = TensorFile(tmp_path / "file"), []
    real = saved_file.sha256
    monkeypatch.setattr(saved_file, "sha256", lambda held: checked.append(len(held)) or real(held))
    for place in [((1, 2), (0, 6), (0, 8)), ((0, 3), (1, 2), (2, 5)), ((0, 0), (0, 6), (0, 8))]:
        checked.clear()
        expected = value[tuple(slice(*end) for end in place)]
        assert np.array_equal(read_slice(file, "x", place, digests, block), expected)
        assert sum(checked) <= expected.nbytes + 2 * block * max(1, place[0][1] - place[0][0])
        assert np.array_equal(read_slice(file, "x", place), expected)
    for name, one in (others | {"x": value}).items():
        for _ in range(60):
            place = tuple(tuple(sorted(random.integers(0, size + 1, 2).tolist())) for size in one.shape)
            assert np.array_equal(read_slice(file, name, place), one[tuple(slice(*end) for end in place)])
    with pytest.raises(CheckpointError, match=r"bytes 704 to 768 of x do not have the SHA-256"):
        read_slice(file, "x", ((3, 4), (5, 6), (7, 8)), digests, block)


# Nothing half-written


def listing(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_saving_ends_in_all_where_one_fails(tmp_path, monkeypatch):
    """The old state stays, and no other file is left. Then a new state replaces it, and the old parts are removed."""
    pair = Pair(monkeypatch)
    write_halves(pair, tmp_path / "old")
    before = listing(tmp_path)
    real = saved_file.write_part

    def full(path, *rest):
        if jax.process_index() == 1:
            raise OSError(27, "File too large")
        return real(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(saved_file, "write_part", full)
        for name in ("old", "new"):
            for number, told in enumerate(write_halves(pair, tmp_path / name, first=1)):
                assert told.startswith("CheckpointError: ")
                assert "cannot be written in parts by 2 processes, which must share its directory" in told
                assert "File too large" in told
                assert ("process 1 of 2 failed" in told) == (number == 0)
    assert listing(tmp_path) == before
    write_halves(pair, tmp_path / "old", first=1)
    assert len(os.listdir(tmp_path)) == 2
    assert read_state_info(tmp_path / "old")["tokens"] == [[1] * len(row) for row in TOKENS]


def test_a_state_of_one_process_that_replaces_another_removes_its_parts(halves, tmp_path):
    index = copied(halves[0], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    params, state = small()
    with file_size_limit(1000), pytest.raises(CheckpointError, match="too large"):
        save_state(index, state, params)
    load(index)
    save_state(index, state, params)
    assert os.listdir(tmp_path) == ["state"]
    load(index)


# Damage


def test_a_part_that_is_missing_cut_or_foreign(halves, tmp_path):
    """Of another run, or of another process."""
    index = copied(halves[0], tmp_path)
    parts, run = parts_of(index), TensorFile(index).metadata["run"].strip('"')
    whole = [part.read_bytes() for part in parts]
    other = parts_of(halves[2])[0].read_bytes()
    for number, data, told in (
        *((number, None, rf".*{number}-of-2.*no such file") for number in (0, 1)),
        *((number, whole[number][:-7], ".*truncated") for number in (0, 1)),
        (0, other, f" .* must be of run '{run}', got '"),
        (0, whole[1], " .* must have the header_sha256 that the index gives"),
    ):
        parts[number].unlink()
        if data is not None:
            parts[number].write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"part {number} of 2:{told}"):
            load(index)
        parts[number].write_bytes(whole[number])
    load(index)


def test_any_changed_byte_is_noticed(halves, tmp_path):
    index = copied(halves[0], tmp_path)
    random = np.random.default_rng(0)
    for path in (index, *parts_of(index)):
        data = path.read_bytes()
        for at in [*random.integers(8, len(data), 25), len(data) - 1]:
            change_byte(path, at)
            with pytest.raises(CheckpointError):
                load(index)
            path.write_bytes(data)
    load(index)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"version": "2"}, "format version 2; this jshadow understands version 1"),
        ({"parts": "[]"}, "parts must be a list of files in a folder beside the index"),
        ({"parts": '[{"file":"../x/y","bytes":1,"header_sha256":""}]'}, "parts must be a list of files"),
        ({"parts": '[{"file":"/y","bytes":1,"header_sha256":""}]'}, "parts must be a list of files"),
        ({"run": '"another"'}, "must be of run 'another', got '"),
        ({"leaves": "{}"}, "must be a slice of a tensor of the state"),
        *(
            ({"leaves": wrong}, "leaves must have a dtype and a shape for each tensor")
            for wrong in ('{"last":["int32",[-1]]}', '{"last":["int32",2]}', "[]")
        ),
        ({"format": "something else"}, "got a safetensors file of format 'something else'"),
        # with right digests everywhere, the numbers of all slices are still counted
        (lambda x: {"parts": json.dumps(json.loads(x["parts"])[:1])}, r"the parts must have \d+ of \S+, got \d+"),
    ],
)
def test_an_index_that_is_not_as_jshadow_writes_it(halves, tmp_path, texts, told):
    index = copied(halves[0], tmp_path)
    tensors, known = content_of(index)
    seal(index, tensors, known | (texts(known) if callable(texts) else texts))
    with pytest.raises(CheckpointError, match=told):
        load(index)


# The learned arrays of a policy

LEARNED_FROM = random_tokens(60, seed=5)
LOKI = Loki(budget=9, columns=3, calibration="offline")
LEARNERS = {"loki": LOKI, "infinigen": InfiniGen(columns=4, calibration="offline"), "less": SMALL_LESS}


@functools.cache
def learned(name):
    """A policy and random arrays as if it had learned them."""
    policy = LEARNERS[name]
    if name == "less":
        return policy, jax.tree.map(np.asarray, fitted_for(TINY))
    rng, shapes = np.random.default_rng(1), policy.fitted_shapes(TINY)
    is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}
    return policy, jax.tree.map(lambda shape: rng.standard_normal(shape).astype(np.float32), shapes, **is_shape)


def written(path, name="less"):
    policy, fitted = learned(name)
    save_fitted(path, fitted, policy, model(), about={"tokens": 60})
    return path.read_bytes()


def load_learned(path, policy=SMALL_LESS):
    return load_fitted(path, model(), policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_what_a_fit_learned_comes_back_and_is_used(name, tmp_path):
    policy = LEARNERS[name]
    fitted = learned("less")[1] if name == "less" else policy.fit(model(), LEARNED_FROM)
    save_fitted(tmp_path / "a", fitted, policy, model())
    back = load_learned(tmp_path / "a", policy)
    jax.tree.map(np.testing.assert_array_equal, back, fitted)
    logits, _ = decode.prefill(model(), LEARNED_FROM[None], [60], policy, capacity=96, fitted=back)
    assert np.isfinite(logits).all()


OTHER_SETTINGS = {
    "loki": dataclasses.replace(LOKI, budget=30, columns=16),
    "less": dataclasses.replace(SMALL_LESS, heavy=1, recent=3, normalize=True),
}


@pytest.mark.parametrize("kind", LEARNERS)
def test_arrays_come_back(kind, tmp_path):
    """Settings that decide no shape may differ."""
    policy, fitted = learned(kind)
    assert written(tmp_path / "a", kind) == written(tmp_path / "b", kind)
    for one in (policy, OTHER_SETTINGS.get(kind, policy)):
        back = load_learned(tmp_path / "a", one)
        jax.tree.map(np.testing.assert_array_equal, back, fitted)
        assert jax.tree.map(lambda leaf: leaf.shape, back) == policy.fitted_shapes(TINY)
    info = read_fitted_info(tmp_path / "a")
    assert (info["policy"]["name"], info["about"], info["dtype"]) == (kind, {"tokens": 60}, "float32")


LEARNED_BY_OTHERS = [
    (lambda: init_params(TINY, seed=9), SMALL_LESS, "weights: file has"),
    (
        lambda: init_params(dataclasses.replace(TINY, ffn_dim=64)),
        SMALL_LESS,
        r"config\.ffn_dim: file has 48, params has",
    ),
    (lambda: model(TINY, "bfloat16"), SMALL_LESS, "dtype: file has 'float32', params has 'bfloat16'"),
    (model, LOKI, r"policy\.name: file has 'less', policy has 'loki'"),
    (model, dataclasses.replace(SMALL_LESS, state_rank=8), r"arrays\.phi\.second: file has"),
    (model, Full(), r"policy\.name"),
]


def test_what_belongs_to_another_is_refused(tmp_path):
    written(tmp_path / "a")
    for make, policy, told in LEARNED_BY_OTHERS:
        with pytest.raises(StateMismatch, match=told):
            load_fitted(tmp_path / "a", make(), policy)
    written(tmp_path / "b", "loki")
    with pytest.raises(ConfigError, match="policy must use learned arrays"):
        load_learned(tmp_path / "b", Loki())


FORGED = [
    ({"version": "2"}, "format version 2"),
    ({"version": "one"}, "version must be JSON"),
    ({"policy": "[]"}, "policy must have settings"),
    ({"policy": json.dumps({"name": "magic", "settings": {}})}, "policy must have settings"),
    ({"policy": json.dumps({"name": "less", "settings": []})}, "policy must have settings"),
    ({"sha256": "{}"}, "one digest for each tensor"),
    ({"config": "3"}, "config: file has 3"),
    (None, "does not have the SHA-256"),
]


def test_metadata_that_no_one_wrote(tmp_path):
    written(tmp_path / "a")
    arrays, texts = content_of(tmp_path / "a")
    assert texts["format"] == FORMAT
    for changes, told in FORGED:
        wrong = {"sha256": json.dumps(dict.fromkeys(json.loads(texts["sha256"]), "0" * 64))}
        seal(tmp_path / "a", arrays, texts | (wrong if changes is None else changes))
        with pytest.raises((CheckpointError, StateMismatch), match=told):
            load_learned(tmp_path / "a")


def test_what_cannot_be_saved_is_told(tmp_path, monkeypatch):
    """A write that fails leaves the file of before, and no other."""

    def full(*_):
        raise OSError(28, "no space left")

    (policy, fitted), before, path = learned("less"), written(tmp_path / "a"), tmp_path / "a"
    nan = fitted | {"psi": fitted["psi"] | {"scale": fitted["psi"]["scale"] * np.float32("nan")}}
    monkeypatch.setattr(saved_file, "write_payload", full)
    for place, arrays, own, error, told in (
        (path, nan, policy, CheckpointError, r"psi\.scale: 24 of 24 values are NaN"),
        (path, None, Full(), ConfigError, "may learn nothing"),
        (path, learned("loki")[1], policy, ConfigError, "must be what the fit of less returned"),
        ("/dev/null/a", fitted, policy, CheckpointError, "cannot be written"),
        (path, fitted, policy, CheckpointError, "no space left"),
    ):
        with pytest.raises(error, match=told):
            save_fitted(place, arrays, own, model())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]


def test_only_learners_have_shapes():
    """Whoever fits tells the shapes, and uses the arrays once it is set so."""
    for policy in POLICIES.values():
        if issubclass(policy, Learns):
            assert policy().fitted_shapes(TINY)
            assert with_fitted(policy()).reads_fitted
        else:
            assert with_fitted(policy()) == policy()
            assert not reads_fitted(policy())
