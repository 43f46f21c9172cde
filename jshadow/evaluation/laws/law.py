"""What a law is, its comparisons, the inputs of all laws, and the forms in which states are compared."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.errors import JshadowError
from jshadow.models.config import ModelConfig
from jshadow.ops.packing import ROW_BITS, Scaled
from jshadow.ops.packing import dequantize_rows as dequantize_eagerly
from jshadow.ops.packing import split_rows as split_eagerly
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import abstract_state
from jshadow.policies import Quantized, ShadowKV
from jshadow.policies.base import Policy
from jshadow.policies.registry import LAW_SETTINGS
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv.key_codecs import by_token
from jshadow.policies.shadowkv.landmarks import Levels, mean_kind
from jshadow.weights.params import Params, init_params

# This times the expected number is added to every tolerance, because float32 has about seven digits.
_RELATIVE = 1e-7


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy with the two settings that the laws use.

    The `small` settings drop or approximate tokens of the laws' prompts. The `lossless` settings, if there are any,
    equal full attention on them.
    """

    name: str
    small: Policy
    lossless: Policy | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """The arguments of one check of a law. The `setting` is "small" or "lossless".

    `row` is the row of the batch that is checked, or None for all. `piece` is the number of tokens of a piece of the
    prompt, or None for one piece.
    """

    subject: Subject
    fetch: str = "resident"
    setting: str = "small"
    row: int | None = None
    piece: int | None = None

    @property
    def policy(self) -> Policy:
        """The policy of the subject with the case's setting."""
        policy = self.subject.small if self.setting == "small" else self.subject.lossless
        assert policy is not None, f"{self.subject.name} claims no lossless settings"
        return policy

    def __str__(self) -> str:
        """Describe the case, for example "quest small device_put row 1"."""
        words = [self.subject.name, self.setting, self.fetch]
        words += [f"{name} {value}" for name, value in (("row", self.row), ("piece", self.piece)) if value is not None]
        return " ".join(words)


class Difference(Exception):
    """The error that the function of a law raises if two values that must agree differ, such as the leaf `place`.

    `largest` is the largest absolute difference, and `tolerance` the allowed one. Both are None if there is no number.
    """

    def __init__(self, place: str, largest: float | None = None, tolerance: float | None = None) -> None:
        super().__init__(place)
        self.place, self.largest, self.tolerance = place, largest, tolerance

    def __str__(self) -> str:
        """Describe the difference in one line."""
        if self.largest is None:
            return self.place
        return f"{self.place} differ by {self.largest:.3g}, tolerance {self.tolerance:g}"


class LawBroken(JshadowError, AssertionError):
    """The error that a law raises if a policy breaks it in a case."""

    def __init__(self, law: str, case: Case, difference: Difference) -> None:
        super().__init__(f"{law}: {case}: {difference}")
        self.law, self.case, self.difference = law, case, difference


Cases = Callable[[Subject, tuple[str, ...]], Iterable[Case]]
Claim = Callable[[Subject], str | None]


@dataclasses.dataclass(frozen=True)
class Law:
    """A law: a `statement` of one sentence, and a `check` that raises `Difference` if a case breaks it.

    `cases` returns the cases that `jshadow laws` checks for (subject, fetch modes). `unclaimed` returns why the law
    does not apply to a subject, or None if it applies. Calling a law with a case checks the case.
    """

    name: str
    statement: str
    check: Callable[[Case], None]
    cases: Cases
    unclaimed: Claim

    def __call__(self, case: Case) -> None:
        """Raise LawBroken if the case breaks the law."""
        try:
            self.check(case)
        except Difference as difference:
            raise LawBroken(self.name, case, difference) from None


LAWS: dict[str, Law] = {}


def in_each_mode(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """Return the cases with small settings in every fetch mode."""
    return [Case(subject, fetch) for fetch in fetches]


def in_one_mode(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """Return the case with small settings in the first fetch mode. Another law checks that all modes agree."""
    return [Case(subject, fetches[0])]


def both_settings(subject: Subject, fetches: tuple[str, ...]) -> Iterable[Case]:
    """Return the cases with small settings, and with lossless settings if there are any, in every fetch mode."""
    settings = ("small",) if subject.lossless is None else ("small", "lossless")
    return [Case(subject, fetch, setting) for fetch in fetches for setting in settings]


def _always(subject: Subject) -> str | None:
    return None


def lossless_only(subject: Subject) -> str | None:
    """Return why a law about lossless settings does not apply to a policy, or None if it applies."""
    return "no lossless settings are registered" if subject.lossless is None else None


def law(statement: str, *, cases: Cases = in_each_mode, unclaimed: Claim = _always) -> Callable[[Any], Law]:
    """Return a decorator that turns the function that checks a law into a `Law`, and adds it to LAWS."""

    def add(check: Callable[[Case], None]) -> Law:
        new = Law(check.__name__, statement, check, cases, unclaimed)
        LAWS[new.name] = new
        return new

    return add


# Comparisons for the functions of laws


def close(got: Any, want: Any, tolerance: float, place: str = "logits") -> None:
    """Raise Difference if the shapes of two arrays differ, or if their numbers differ by more than the tolerance.

    `place` is the name of the arrays in the error.
    """
    try:
        np.testing.assert_allclose(got, want, rtol=_RELATIVE, atol=tolerance)
    except AssertionError:
        raise Difference(*_measured(got, want, place), tolerance) from None


def equal(got: Any, want: Any, place: str) -> None:
    """Raise Difference unless two arrays are equal. `place` is the name of the arrays in the error."""
    try:
        np.testing.assert_array_equal(got, want)
    except AssertionError:
        raise Difference(*_measured(got, want, place), 0.0) from None


def holds(condition: Any, place: str) -> None:
    """Raise Difference unless the condition is true. `place` is a sentence that describes the problem."""
    if not condition:
        raise Difference(place)


def _measured(got: Any, want: Any, place: str) -> tuple[str, float]:
    """Return the place and the largest absolute difference of two arrays."""
    one, two = (np.asarray(array).astype(np.float64) for array in (got, want))
    if one.shape != two.shape:
        return f"{place}: shapes {one.shape} and {two.shape}", float("inf")
    apart = np.abs(one - two)[~((one == two) | (np.isnan(one) & np.isnan(two)))]
    return place, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))


def _paths_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


# There are three layers, because a policy may treat the first and the last one differently. The size of the vocabulary
# is a prime number, so that a wrong reshape fails.
TINY = ModelConfig(
    model_type="llama",
    vocab_size=101,
    num_layers=3,
    model_dim=32,
    ffn_dim=48,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context=256,
)
# 61 and 27 are not multiples of any chunk size, and 5 tokens are too few for any chunk to be selected.
LENGTHS = (61, 27, 5)
BATCH = len(LENGTHS)
CAPACITY = 96
FETCH_MODES = ("resident", "device_put", "zero_copy")


@functools.cache
def model(config: ModelConfig = TINY, dtype: str = "float32") -> Params:
    """Return a model with random weights, see `init_params`. Its attention is neither uniform nor one-hot."""
    return init_params(config, seed=0, dtype=dtype)


def random_tokens(*shape: int, seed: int = 0, config: ModelConfig = TINY) -> np.ndarray:
    """Return random token ids, int32 of the given shape."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


PROMPT = random_tokens(BATCH, max(LENGTHS), seed=1)
STEPS = random_tokens(BATCH, 12, seed=2)


@functools.cache
def _prefilled(policy: Policy, fetch: str, dtype: str) -> tuple[Array, KVState]:
    params = model(TINY, dtype)
    return decode.prefill(params, PROMPT, np.asarray(LENGTHS), policy, capacity=CAPACITY, fetch=fetch)


def prefilled(policy: Policy, fetch: str = "resident", dtype: str = "float32") -> tuple[Array, KVState]:
    """Prefill the batch, once in a process. Returns the logits [B, V] of the last tokens, and a new
    fork of the state.
    """
    logits, state = _prefilled(policy, fetch, dtype)
    return logits, state.fork()


def state_of(case: Case) -> KVState:
    """Return a new fork of the state after the prompts, for a case."""
    return prefilled(case.policy, case.fetch)[1]


def run_steps(
    params: Params, state: KVState, tokens: np.ndarray, active: np.ndarray | None = None
) -> tuple[np.ndarray, KVState]:
    """Feed given tokens [B, T] step by step. `active` [B, T] says which rows take part in each step.

    Returns the float32 logits [B, T, V], and the state after the last step.
    """
    logits = []
    for i in range(tokens.shape[1]):
        out, state = decode.decode_step(params, tokens[:, i], state, active=None if active is None else active[:, i])
        logits.append(np.asarray(out))
    return np.stack(logits, axis=1), state


@functools.cache
def teacher_forced(policy: Policy, fetch: str, dtype: str = "float32") -> np.ndarray:
    """Return the logits [B, 6, V] of six steps on given tokens after the prompt."""
    return run_steps(model(TINY, dtype), prefilled(policy, fetch, dtype)[1], STEPS[:, :6])[0]


def abstract(case: Case, fetch: str, room: int | None = None) -> KVState:
    """Return the abstract state (shapes and dtypes) of a case's batch in a fetch mode, with a room for new tokens."""
    sizes: dict[str, Any] = {"batch": BATCH, "capacity": CAPACITY, "prompt": min(LENGTHS), "dtype": "float32"}
    return abstract_state(TINY, case.policy, **sizes, fetch=fetch, room=room)


# Leaves of a state


_CACHE = ("resident", "ages", "values", "keys")  # leaves of a layer that are a cache of units, see shadowkv/state.py


def changing(state: KVState) -> dict[str, np.ndarray]:
    """Return the leaves that a step may change, by path."""
    return {path: np.asarray(leaf) for path, leaf in _paths_of(state.split()[1]).items()}


def meaningful(state: KVState) -> dict[str, np.ndarray]:
    """Return `changing` without the last unit of each host tail. Skipped writes go to that unit, so it is undefined."""
    return {path: leaf[:, :, :-1] if path.endswith(".array") else leaf for path, leaf in changing(state).items()}


def remembered(state: KVState) -> dict[str, np.ndarray]:
    """Return `meaningful` without the count of moved bytes, and with caches of units in one order.

    The count is left out because a turn also moves units for the padding of its last piece. The places of a cache are
    sorted by the units in them. A cache with ages is left out, because a turn leaves only its last units in it.
    """
    leaves = {path: leaf for path, leaf in meaningful(state).items() if not path.endswith(".fetched")}
    for layer in [path.removesuffix("resident") for path in leaves if path.endswith(".resident")]:
        parts = {path: leaves.pop(path) for path in (f"{layer}{name}" for name in _CACHE) if path in leaves}
        if f"{layer}ages" in parts:
            continue
        units = parts[f"{layer}resident"]
        order = np.argsort(units, axis=2, kind="stable")
        for path, leaf in parts.items():
            index = order.reshape(*order.shape, *[1] * (leaf.ndim - 3))
            there = units.reshape(index.shape) >= 0
            leaves[path] = np.take_along_axis(np.where(there, leaf, -1), index, axis=2)
    return leaves


# Subjects


def subject_of(policy: type[Policy], settings: Mapping[str, object] | None = None) -> Subject:
    """Return a policy with the small and lossless settings that it, or a base class, is registered with.

    `settings` by dotted name replace registered small settings. Raises ConfigError if a setting is unknown, or out of
    range for the model of the laws.
    """
    names = (getattr(kind, "name", "") for kind in policy.__mro__)
    registered = LAW_SETTINGS[next(name for name in names if name in LAW_SETTINGS)]
    small = _checked(policy, "small", {**registered.small, **(settings or {})})
    lossless = None
    if registered.lossless is not None:
        lossless = _checked(policy, "lossless", registered.lossless(CAPACITY, TINY))
    return Subject(policy.name, small, lossless)


def _checked(policy: type[Policy], kind: str, settings: Mapping[str, object]) -> Policy:
    """Create the policy with settings by dotted name. Raises ConfigError if they do not suit the tiny model."""
    chosen = with_settings(policy(), settings, f"the {kind} settings of {policy.name}")
    chosen.resolve(TINY, CAPACITY)
    return chosen


@functools.cache
def offloads(policy: Policy) -> bool:
    """Return whether the policy keeps rows in host memory in at least one layer of the tiny model."""
    resolved = policy.resolve(TINY, CAPACITY)
    specs = cache_specs(TINY, resolved, BATCH, CAPACITY, min(LENGTHS), "float32", "device_put")
    return any(spec.policy.host_layout(spec) is not None for spec in specs)


def modes_of(subject: Subject) -> tuple[str, ...]:
    """Return the default fetch modes of a subject. One is enough, because a law checks that all modes agree."""
    return FETCH_MODES[1:2] if offloads(subject.small) else FETCH_MODES[:1]


def same_settings(subject: Subject) -> bool:
    """Return whether the small settings equal the lossless ones, as they do for a policy without settings."""
    return subject.lossless is not None and subject.small.resolve(TINY, CAPACITY) == subject.lossless.resolve(
        TINY, CAPACITY
    )


NEIGHBOR = 5e-3  # the largest change of a logit if one code of a key changes by one step

# Each is one program and not dozens of single operations.
dequantize_rows = jax.jit(dequantize_eagerly, static_argnums=(1, 2))
split_rows = jax.jit(split_eagerly, static_argnums=(1, 2, 3, 4))


@functools.partial(jax.jit, static_argnums=(0, 1))
def expanded(policy: ShadowKV, half: str, rows: Any, right: Any) -> Any:
    """Return the keys of the rows of a half, "frozen" or "live". The rows lie in chunks."""
    codec = policy.codec if half == "frozen" else policy.later_codec
    return codec.expand(by_token(rows, policy.chunk_size), right)


def _decoded(values: Any, prefix: str, spec: Any, layer: Any, lengths: Any) -> None:
    """Replace the codes of a layer in `values` by their values, for all real tokens."""
    policy, names = spec.policy, list(values)
    rows: Any
    if isinstance(policy, ShadowKV):
        if policy.keys.name != "lowrank":
            for name in [name for name in names if name.startswith(f"{prefix}frozen.right")]:
                del values[name]
        shared = getattr(layer.frozen, "later", None)
        later = policy.later_codec, layer.frozen.right if shared is None else shared
        for half, (codec, right) in {"frozen": (policy.codec, layer.frozen.right), "live": later}.items():
            if codec.name != "lowrank" and values.pop(f"{prefix}{half}.left", None) is not None:
                keys = np.asarray(expanded(policy, half, getattr(layer, half).left, right))
                first = 0 if half == "frozen" else layer.frozen.chunks[:, None] * policy.chunk_size
                real = first + np.arange(keys.shape[2]) < np.asarray(lengths)[:, None]
                values[f"{prefix}{half}.left decoded"] = np.where(real[:, None, :, None], keys, 0)
    if isinstance(policy, Quantized):
        for name in ("k", "v"):
            for part in ("codes", "scale"):
                del values[f"{prefix}live.{name}.{part}"]
            numbers = np.asarray(policy.decode(spec, getattr(layer.live, name)))
            real = np.arange(numbers.shape[2]) < np.asarray(lengths)[:, None]
            values[f"{prefix}live.{name} decoded"] = np.where(real[:, None, :, None], numbers, 0)
    for half in ("frozen", "live"):
        marks = getattr(getattr(layer, half), "landmarks", None)
        kind = policy.landmarks.dtype if isinstance(policy, ShadowKV) else "model"
        levels = {"": (marks, kind)}
        if isinstance(marks, Levels):
            levels = {".means": (marks.means, mean_kind(kind)), ".details": (marks.details, kind)}
        for name, (rows, kind) in levels.items():
            if isinstance(rows, Scaled):
                for part in ("codes", "scale"):
                    del values[f"{prefix}{half}.landmarks{name}.{part}"]
                each = rows.scale.shape[3]
                rows = jax.tree.map(lambda x, each=each: x.reshape(*x.shape[:3], each, -1), rows)
                kept = dequantize_rows(rows, ROW_BITS[kind], "float32")
                values[f"{prefix}{half}.landmarks{name} decoded"] = np.asarray(kept)
    if (layout := policy.host_layout(spec)) is not None and layout.bits:
        for half in ("prompt", "tail"):
            if values.pop(f"{prefix}host.{half}.array", None) is not None:
                rows = getattr(layer.host, half).array
                rows = rows[:, :, :-1] if half == "tail" else rows  # skipped writes go to the tail's last unit
                codes, scale = split_rows(rows, layout.unit, spec.head_dim, layout.bits, spec.dtype)
                values[f"{prefix}host.{half} decoded"] = np.asarray(codes, np.float32) * np.asarray(scale, np.float32)


def as_seen(state: Any, lengths: Any) -> Any:
    """Return the leaves of a state by path, in a form that does not depend on rotations of eigenvectors.

    Low-rank factors are replaced by their products, and rows in a learned basis by rows in the standard basis.
    """
    values: Any = {}
    layer: Any
    path: Any
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        values[jax.tree_util.keystr(path, simple=True, separator=".")] = np.asarray(leaf, np.float64)
    for index, (spec, layer) in enumerate(zip(state.specs, state.layers, strict=True)):
        _decoded(values, f"layers.{index}.", spec, layer, lengths)
    for name in [name for name in values if name.endswith("frozen.left")]:
        layer = name.removesuffix("frozen.left")
        left, right = values.pop(name), values.pop(f"{layer}frozen.right")
        rows = left.reshape(len(left), -1, right.shape[2])
        values[f"{layer}keys"] = np.einsum("bsr,bhrd->bshd", rows, right)
        if f"{layer}live.left" in values:
            later = values.pop(f"{layer}live.left").reshape(len(left), -1, right.shape[2])
            values[f"{layer}later keys"] = np.einsum("bsr,bhrd->bshd", later, right)
    for name in [name for name in values if name.endswith(("frozen.basis", "frozen.basis.turn"))]:
        layer, basis = name.partition("frozen.basis")[0], values.pop(name)
        for path in (f"{layer}{half}.summaries" for half in ("frozen", "live")):
            if path in values:
                rows = values[path]
                values[path] = np.einsum("bhnr,bhdr->bhnd", rows, basis[..., : rows.shape[3]])
        if basis.shape[2] == basis.shape[3]:  # Loki stores whole keys in this basis, followed by their values
            dim = basis.shape[2]
            for path in (f"{layer}live.recent.k", f"{layer}host.prompt.array", f"{layer}host.tail.array"):
                keys = np.einsum("bhnr,bhdr->bhnd", values[path][..., :dim], basis)
                values[path] = np.concatenate([keys, values[path][..., dim:]], axis=3)
    return values


def same_codes(mine: Any, theirs: Any, row: int | None = None) -> Any:
    """Return the rows in which all codes of two results of `as_seen` have the same values, bool [B].

    `mine` is a batch, or the row `row` of the batch `theirs` alone. Raises AssertionError if more than 1 % of the
    values of an array differ. For one row, which has few tokens, the limit is 5 %.
    """
    same: Any = True
    for path in (path for path in mine if path.endswith(" decoded")):
        other = theirs[path] if row is None else theirs[path][row : row + 1]
        if mine[path].shape != other.shape:
            continue  # space for later tokens, of which a row alone has less
        close = np.isclose(mine[path], other, atol=2e-4)
        assert close.mean() > (0.99 if row is None else 0.95), path
        same &= close.reshape(len(close), -1).all(axis=1)
    return np.broadcast_to(same, len(next(iter(mine.values()))))


def later_rows(state: Any) -> dict[str, np.ndarray]:
    """Return the keys of ShadowKV+'s later tokens by the path of their rows in `changing`, float32 [B, h_kv, T, d].

    The rows have the bytes of scales, and two programs may round a scale differently. So rows cannot be compared. Only
    layers whose later keys have a code of their own are in it.
    """
    found = {}
    for index, (spec, layer) in enumerate(zip(state.specs, state.layers, strict=True)):
        if (shared := getattr(layer.frozen, "later", None)) is not None:
            found[f".layers[{index}][0].left"] = np.asarray(expanded(spec.policy, "live", layer.live.left, shared))
    return found
