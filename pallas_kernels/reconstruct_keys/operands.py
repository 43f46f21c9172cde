"""The two forms in which keys may lie there."""

import jax

from pallas_kernels.codes import Profile
from pallas_kernels.reconstruct_keys.codes import Codes, check_codes
from pallas_kernels.reconstruct_keys.factors import Factors, check

Keys = Factors | Codes


def keys_of(
    left: jax.Array, right: jax.Array | None, ids: jax.Array, inverse: jax.Array, tail: jax.Array | None,
    tail_unit: jax.Array | None, mean: jax.Array | None, step: jax.Array | None, profile: Profile | None,
) -> Keys:  # fmt: skip
    """The operands, checked: Codes where there is a profile, else Factors.

    Raises:
        ValueError: something is wrong, or missing.
    """
    if profile is None:
        if right is None or mean is not None or step is not None:
            raise ValueError("mean, step and profile belong together, and right may be left out with them alone")
        factors = Factors(left, right, ids, inverse, tail, tail_unit)
        check(factors)
        return factors
    if mean is None or step is None:
        raise ValueError("mean, step and profile belong together, got a profile without one of them")
    codes = Codes(left, right, ids, inverse, tail, tail_unit, mean, step, profile)
    check_codes(codes)
    return codes
