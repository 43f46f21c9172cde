"""ShadowKV's settings under the names that the oracle has for them."""

from typing import Any

from jshadow.policies import ShadowKV
from jshadow.policies.settings import dotted_settings

PREFIXES = {"keys": "key_", "landmarks": "landmark_", "values": "value_", "choice": "", "quirks": ""}


def oracle_settings(policy: ShadowKV) -> dict[str, Any]:
    """Flat names: "landmarks.tokens" is landmark_tokens, "quirks.score_dim" is score_dim; the code of keys is keys."""
    flat = {}
    for name, value in dotted_settings(policy).items():
        record, dot, field = name.partition(".")
        flat[PREFIXES[record] + field if dot else name] = value
    del flat["pool"]  # no result depends on it
    return flat
