"""The value arrays that fetch_reconstruct reads, and the checks of their shapes and dtypes."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import bits as layout
from pallas_kernels.arguments import expect_dtype, expect_shape
from pallas_kernels.reconstruct_keys.operands import ChosenKeys


@functools.partial(jax.tree_util.register_dataclass, data_fields=["prompt", "tail"], meta_fields=["bits", "dtype"])
@dataclasses.dataclass(frozen=True)
class HostRows:
    """Values of all chunks, usually in pinned host memory. Each chunk of c tokens is one row.

    Without `bits` a row has c * d numbers. With `bits` a row has words of 16 bits instead: first the two's complement
    codes of the chunk's tokens, then the scale of each token, as `pallas_kernels.bits.join_rows` packs them. A value is
    its code times its scale in float32, rounded to `dtype`.

    Attributes:
        prompt: floating [B, h_kv, U, c * d], or uint16 [B, h_kv, U, words of a chunk].
        tail: values of W' chunks after the prompt, [B, h_kv, W', width of prompt]. W' is at least the number of chunks
            in the keys' tail.
        bits: bits of a packed number, 8 or 4. None if values are not packed.
        dtype: dtype of the unpacked values, given only with `bits`. Scales are float32 if it has four bytes, else
            float16.
    """

    prompt: jax.Array
    tail: jax.Array | None = None
    bits: int | None = None
    dtype: jax.typing.DTypeLike | None = None

    @property
    def value_dtype(self) -> jnp.dtype:
        """Dtype of the values once they are on the device."""
        return self.prompt.dtype if self.dtype is None else jnp.dtype(self.dtype)

    @property
    def scale_dtype(self) -> Any:
        """Dtype of a token's scale, if values are packed."""
        return layout.scale_dtype(self.value_dtype)

    @property
    def places(self) -> int:
        """How many numbers one element of a row holds: as many as fit into a word, or 1 if values are not packed."""
        return 1 if self.bits is None else layout.WORD // self.bits

    def token_width(self, dim: int) -> int:
        """Return the number of row elements of one token without its scale: numbers, or words if packed."""
        return dim if self.bits is None else layout.token_words(dim, self.bits)

    def row_width(self, chunk: int, dim: int) -> int:
        """Return the number of elements in the row of a chunk: numbers, or words if packed."""
        return chunk * dim if self.bits is None else layout.row_words(chunk, dim, self.bits, self.value_dtype)


class KeptRows(NamedTuple):
    """A cache of keys and values on the device: P places for each head, with the row of one chunk each.

    Attributes:
        values: [B, h_kv, P, c * d], in the dtype of the fetched values.
        keys: [B, h_kv, P, c * d], in the dtype of the rebuilt keys.
        places: int32 [B, h_kv, k], the place of each of the k selected chunks. Those of missed chunks are distinct.
        missed: int32 [B, h_kv, k], the indices of the selected chunks that are fetched and rebuilt, in rising order,
            and then k. All other places stay as they are.
    """

    values: jax.Array
    keys: jax.Array
    places: jax.Array
    missed: jax.Array


def check(values: HostRows, keys: ChosenKeys, kept: KeptRows | None) -> None:
    """Check the shapes and dtypes of values and kept rows against the keys. The keys must be checked before.

    Raises:
        ValueError: a shape or a dtype is wrong, or one of two arguments that belong together is missing.
    """
    if (values.bits is None) != (values.dtype is None):
        raise ValueError("values.bits and values.dtype belong together, got one of them")
    prompt, tail = values.prompt, values.tail
    batch, heads, _ = keys.ids.shape
    if values.bits is not None:
        if values.bits not in (8, 4):
            raise ValueError(f"values.bits must be 8 or 4, got {values.bits}")
        if not jnp.issubdtype(values.value_dtype, jnp.floating):
            raise ValueError(f"values.dtype must be floating, got {values.value_dtype.name}")
    width = values.row_width(keys.chunk, keys.dim)
    expect_shape("values", prompt, (batch, heads, keys.left.shape[-2], width))
    expect_dtype("values", prompt, jnp.floating if values.bits is None else jnp.uint16)
    if (tail is None) != (keys.tail is None):
        raise ValueError("values.tail and tail belong together, got one of them")
    if tail is not None and keys.tail is not None:
        expect_shape("values.tail", tail, (batch, heads, "W'", width))
        expect_dtype("values.tail", tail, prompt.dtype)
        if tail.shape[2] < keys.tail.shape[-2]:
            raise ValueError(f"values.tail must have the {keys.tail.shape[-2]} chunks of tail, got {tail.shape[2]}")
    if kept is not None:
        rows: tuple[int | str, ...] = (batch, heads, "P", keys.chunk * keys.dim)
        for name, array, dtype in (("values", kept.values, values.value_dtype), ("keys", kept.keys, keys.dtype)):
            expect_shape(f"kept.{name}", array, rows)
            rows = array.shape
            expect_dtype(f"kept.{name}", array, dtype)
        for name, array in (("places", kept.places), ("missed", kept.missed)):
            expect_shape(f"kept.{name}", array, keys.ids.shape)
            expect_dtype(f"kept.{name}", array, jnp.int32)
