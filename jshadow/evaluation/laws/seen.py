"""The states that two programs make of one prompt, as values that can be compared.

Numbers of two programs differ in their last bit. So eigenvectors may turn, and a number next to the edge of a code may
get the neighbouring code. So factors are compared by their products, and codes by the numbers that they stand for.
"""

from typing import Any

import jax
import numpy as np

from jshadow.ops.packing import ROW_BITS, Scaled, dequantise_rows, split_rows
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv.key_codecs import by_token
from jshadow.policies.shadowkv.landmark_levels import Levels, mean_kind

NEIGHBOUR = 5e-3  # what a key that one code moves by a step may do to a logit


def decoded(values: Any, prefix: str, spec: Any, layer: Any, lengths: Any) -> None:
    """Replace a layer's codes in `values` by what they stand for, as far as tokens go: bases may turn, scales differ in
    their last bit."""
    policy, names = spec.policy, list(values)
    rows: Any
    if isinstance(policy, ShadowKV) and policy.keys.name != "lowrank":
        for name in [name for name in names if name.startswith(f"{prefix}frozen.right")]:
            del values[name]
        for half in ("frozen", "live"):
            if values.pop(f"{prefix}{half}.left", None) is not None:
                rows = by_token(getattr(layer, half).left, policy.chunk_size)
                keys = np.asarray(policy.codec.expand(rows, layer.frozen.right))
                first = 0 if half == "frozen" else layer.frozen.chunks[:, None] * policy.chunk_size
                real = first + np.arange(keys.shape[2]) < np.asarray(lengths)[:, None]
                values[f"{prefix}{half}.left decoded"] = np.where(real[:, None, :, None], keys, 0)
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
                kept = dequantise_rows(rows, ROW_BITS[kind], "float32")
                values[f"{prefix}{half}.landmarks{name} decoded"] = np.asarray(kept)
    if (layout := policy.host_layout(spec)) is not None and layout.bits:
        for half in ("prompt", "tail"):
            if values.pop(f"{prefix}host.{half}.array", None) is not None:
                rows = split_rows(getattr(layer.host, half).array, layout.unit, spec.dtype)
                values[f"{prefix}host.{half} decoded"] = np.asarray(dequantise_rows(rows, layout.bits, "float32"))


def as_seen(state: Any, lengths: Any) -> Any:
    """A state's leaves, with factors, and keys in a basis, as their product: eigenvectors may turn."""
    values: Any = {}
    layer: Any
    path: Any
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        values[jax.tree_util.keystr(path, simple=True, separator=".")] = np.asarray(leaf, np.float64)
    for index, (spec, layer) in enumerate(zip(state.specs, state.layers, strict=True)):
        decoded(values, f"layers.{index}.", spec, layer, lengths)
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
        if basis.shape[2] == basis.shape[3]:  # whole keys are kept in it (Loki), in front of their values
            dim = basis.shape[2]
            for path in (f"{layer}live.recent.k", f"{layer}host.prompt.array", f"{layer}host.tail.array"):
                keys = np.einsum("bhnr,bhdr->bhnd", values[path][..., :dim], basis)
                values[path] = np.concatenate([keys, values[path][..., dim:]], axis=3)
    return values


def same_codes(mine: Any, theirs: Any, row: int | None = None) -> Any:
    """The rows, bool [B], of two results of `as_seen` in which all codes stand for the same numbers.

    Raises AssertionError unless nearly all codes do: 99 %, or 95 % of a row alone, whose tokens are few.

    Args:
        mine: of the rows, or of one alone.
        theirs: of the same prompts.
        row: the one in theirs.
    """
    same: Any = True
    for path in (path for path in mine if path.endswith(" decoded")):
        other = theirs[path] if row is None else theirs[path][row : row + 1]
        if mine[path].shape != other.shape:
            continue  # room for later tokens, which a row alone needs less of
        close = np.isclose(mine[path], other, atol=2e-4)
        assert close.mean() > (0.99 if row is None else 0.95), path
        same &= close.reshape(len(close), -1).all(axis=1)
    return np.broadcast_to(same, len(next(iter(mine.values()))))
