"""From the fields of a request to the sampling settings of a row."""

import secrets

from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.schemas import Drawing

OFF = -1  # top_k of vLLM and others that turns the filter off


def settings_of(body: Drawing, choice: int) -> RowSettings:
    """Return how the tokens of choice number `choice` are drawn. Raises ConfigError or ApiError.

    OpenAI's default temperature is 1. Without a seed, each choice gets one at random.
    """
    temperature = 1.0 if body.temperature is None else body.temperature
    top_k = None if body.top_k in (None, 0, OFF) else body.top_k
    seed = secrets.randbits(63) if body.seed is None else (body.seed + choice + 2**63) % 2**64 - 2**63
    return RowSettings(
        Sampler(
            temperature,
            top_k if temperature else None,
            body.top_p if temperature and body.top_p not in (None, 1.0) else None,
            body.min_p if temperature and body.min_p else None,
        ),
        seed=seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=bias_of(body.logit_bias or {}),
    )


def bias_of(given: dict[str, float]) -> dict[int, float]:
    """Return a bias by token id. Raises ApiError if a key is not a token id."""
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise ApiError(400, f"logit_bias must have token ids as keys, got {token!r:.80}", param="logit_bias")
        bias[int(token)] = value
    return bias
