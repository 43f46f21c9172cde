"""Turns settings of lm-evaluation-harness, from a task or its command line, into those of jshadow."""

from collections.abc import Iterable
from typing import Any

from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError
from jshadow.policies import Policy, parse_policy

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # all mean the same
FILTERS = ("top_k", "top_p", "min_p")
KEYS = {"until", "num_beams", "do_sample", "temperature", *MAX_TOKENS, *FILTERS}


def whole(name: str, value: Any) -> int:
    """An integer of at least 1, or its text. Raises ConfigError."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def policy_of(policy: str | Policy, settings: dict[str, Any]) -> Policy:
    """A policy from its name and settings. Raises ConfigError naming what is unknown."""
    if isinstance(policy, Policy):
        if settings:
            raise ConfigError(f"settings must be left out beside a Policy, got {sorted(settings)}")
        return policy
    texts = [f"{name}={'null' if value is None else value}" for name, value in settings.items()]
    return parse_policy(policy, texts)


def parse_generation(settings: dict[str, Any], default: int) -> tuple[Sampler, int, tuple[str, ...]]:
    """The sampler, the most new tokens and the stop strings of a task's generation settings.

    Greedy unless `do_sample` is true, or it is left out and a temperature above 0 is given; sampling without a
    temperature has 1.

    Raises:
        ConfigError: an unknown key, two that mean the same, beams, or a value out of range.
    """
    if unknown := sorted(set(settings) - KEYS):
        raise ConfigError(f"generation settings must be among {sorted(KEYS)}, got {unknown[0]!r}")
    if settings.get("num_beams", 1) != 1:
        raise ConfigError(f"num_beams must be 1, got {settings['num_beams']!r}")
    counts = {name: settings[name] for name in MAX_TOKENS if settings.get(name) is not None}
    if len(counts) > 1:
        raise ConfigError(f"max_gen_toks must be given once, got {counts}")
    name, count = next(iter(counts.items()), ("max_gen_toks", default))
    until = settings.get("until") or ()
    texts: Iterable[Any] = (until,) if isinstance(until, str) else until
    do_sample, temperature = settings.get("do_sample"), settings.get("temperature")
    if do_sample is True and temperature == 0:
        raise ConfigError(f"temperature must be above 0 with do_sample=True, got {temperature!r}")
    if do_sample is False or (do_sample is None and not temperature):
        sampler = Sampler()
    else:
        filters = {name: settings[name] for name in FILTERS if settings.get(name) is not None}
        sampler = Sampler(1.0 if temperature is None else temperature, **filters)
    return sampler, whole(name, count), tuple(texts)


def special_ids(tokenizer: Any, texts: Iterable[str]) -> list[int]:
    """Ids of stop strings that are special tokens, which decoded text leaves out."""
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in texts}
    return [ids[text] for text in ids if ids[text] in tokenizer.all_special_ids]
