"""Checks of arguments. Each ValueError names the argument, the required shape or dtype, and the actual one."""

import jax
import jax.numpy as jnp


def expect_shape(name: str, x: jax.Array, shape: tuple[int | str, ...]) -> None:
    """Check a shape. A number in `shape` must equal the size of that axis; a name stands for any size.

    Raises:
        ValueError: the shape is different.
    """
    fits = x.ndim == len(shape) and all(
        isinstance(expected, str) or size == expected for size, expected in zip(x.shape, shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must have shape [{', '.join(map(str, shape))}], got {list(x.shape)}")


def expect_dtype(name: str, x: jax.Array, *kinds: jax.typing.DTypeLike) -> None:
    """Check that the dtype of x is one of `kinds`, such as jnp.floating or jnp.int32.

    Raises:
        ValueError: the dtype is not one of them.
    """
    if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        names = " or ".join(str(getattr(kind, "__name__", kind)) for kind in kinds)
        raise ValueError(f"{name} must be {names}, got {x.dtype}")


def expect_groups(query_heads: int, kv_heads: int) -> None:
    """Check that the number of query heads is a multiple of the number of KV heads.

    Raises:
        ValueError: it is not.
    """
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"q's heads must be a multiple of the {kv_heads} KV heads, got {query_heads}")
