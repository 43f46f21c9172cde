"""The tokens that a request may draw next, as its grammar tells."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jshadow.engine.rows import WORD, pack_mask
from jshadow.errors import ConfigError, JshadowError

# Maps the new tokens so far to those that may follow: bool [V], or the bit mask of `pack_mask`, uint32 [W].
Allowed = Callable[[Sequence[int]], Any]
FULL_WORD = np.uint32(2**WORD - 1)


def allowed_words(allowed: Allowed, tokens: Sequence[int], size: int) -> np.ndarray:
    """Return the tokens that may follow as a bit mask, uint32 [W], as in `pack_mask`.

    Args:
        allowed: the grammar of a request.
        tokens: the new tokens so far.
        size: V, the size of the vocabulary.

    Raises:
        ConfigError: `allowed` raised an error, or its result is not such a mask, or no token may follow.
    """
    try:
        mask = np.asarray(allowed(list(tokens)))
    except JshadowError:
        raise
    except Exception as error:
        raise ConfigError(f"allowed must return bool [{size}], it raised {error!r:.80}") from error
    words = -(-size // WORD)
    packed = mask.dtype == np.uint32 and mask.shape == (words,)
    if packed and size % WORD:
        mask = mask & np.append(np.full(words - 1, FULL_WORD), FULL_WORD >> np.uint32(WORD - size % WORD))
    if not (packed or (mask.dtype == bool and mask.shape == (size,))) or not mask.any():
        raise ConfigError(
            f"allowed must return bool [{size}] or uint32 [{words}] with at least one token, got {mask.dtype} "
            f"{list(mask.shape)} with {np.count_nonzero(mask)} that are not zero"
        )
    return mask if packed else pack_mask(mask)
