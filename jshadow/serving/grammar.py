"""The tokens that a request may draw next, as its grammar tells."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jshadow.engine.rows.sampling import pack_mask
from jshadow.errors import ConfigError, JshadowError

Allowed = Callable[[Sequence[int]], Any]  # maps the new tokens so far to those that may follow, bool [V]


def allowed_words(allowed: Allowed, tokens: Sequence[int], size: int) -> np.ndarray:
    """Return the tokens that may follow as a bit mask, uint32 [W], as in `pack_mask`.

    Args:
        allowed: the grammar of a request.
        tokens: the new tokens so far.
        size: V, the size of the vocabulary.

    Raises:
        ConfigError: `allowed` raised an error, or its result is not bool [V] with at least one True.
    """
    try:
        mask = np.asarray(allowed(list(tokens)))
    except JshadowError:
        raise
    except Exception as error:
        raise ConfigError(f"allowed must return bool [{size}], it raised {error!r:.80}") from error
    if mask.dtype != bool or mask.shape != (size,) or not mask.any():
        raise ConfigError(
            f"allowed must return bool [{size}] with at least one True, got {mask.dtype} {list(mask.shape)} with "
            f"{np.count_nonzero(mask)}"
        )
    return pack_mask(mask)
