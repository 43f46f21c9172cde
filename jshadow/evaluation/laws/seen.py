"""Converts the states of two different programs for the same prompt to a form in which they can be compared.

The numbers of two programs differ in their last bits. So eigenvectors may rotate, and a number near the middle between
two codes may get either code. Therefore factors are compared by their products, and codes by their values.
"""

import functools
from typing import Any

import jax
import numpy as np

from jshadow.ops.packing import ROW_BITS, Scaled
from jshadow.ops.packing import dequantize_rows as dequantize_eagerly
from jshadow.ops.packing import split_rows as split_eagerly
from jshadow.policies import Quantized, ShadowKV
from jshadow.policies.shadowkv.key_codecs import by_token
from jshadow.policies.shadowkv.landmarks import Levels, mean_kind

NEIGHBOR = 5e-3  # the largest change of a logit if one code of a key changes by one step

# Each is one program and not dozens of single operations.
dequantize_rows = jax.jit(dequantize_eagerly, static_argnums=(1, 2))
split_rows = jax.jit(split_eagerly, static_argnums=(1, 2, 3, 4))


@functools.partial(jax.jit, static_argnums=(0, 1))
def expanded(policy: ShadowKV, half: str, rows: Any, right: Any) -> Any:
    """Return the keys of the rows of a half, "frozen" or "live". The rows lie in chunks."""
    codec = policy.codec if half == "frozen" else policy.later_codec
    return codec.expand(by_token(rows, policy.chunk_size), right)


def decoded(values: Any, prefix: str, spec: Any, layer: Any, lengths: Any) -> None:
    """Replace the codes of a layer in `values` by their values, for all real tokens.

    Codes cannot be compared directly, because bases may rotate and scales may differ in their last bits.
    """
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
        if basis.shape[2] == basis.shape[3]:  # Loki stores whole keys in this basis, followed by their values
            dim = basis.shape[2]
            for path in (f"{layer}live.recent.k", f"{layer}host.prompt.array", f"{layer}host.tail.array"):
                keys = np.einsum("bhnr,bhdr->bhnd", values[path][..., :dim], basis)
                values[path] = np.concatenate([keys, values[path][..., dim:]], axis=3)
    return values


def same_codes(mine: Any, theirs: Any, row: int | None = None) -> Any:
    """Return the rows in which all codes of two results of `as_seen` have the same values, bool [B].

    Args:
        mine: the result of a batch, or of one row.
        theirs: the result of a batch with the same prompts.
        row: if mine is one row, its index in theirs.

    Raises:
        AssertionError: more than 1 % of the values of an array differ. For one row, which has few tokens, the limit is
            5 %.
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
