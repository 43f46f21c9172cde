"""Turns settings of lm-evaluation-harness, from a task or its command line, into those of jshadow."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError
from jshadow.policies import Policy, parse_policy

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # all mean the same
FILTERS = ("top_k", "top_p", "min_p")
KEYS = {"until", "num_beams", "do_sample", "temperature", *MAX_TOKENS, *FILTERS}


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """What `--model_args` of lm-eval may set beside the settings of a policy.

    Attributes:
        dtype, quantize: as in `jshadow.load`; of no effect on Params.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        capacity: tokens that a request may have, `max_length` in lm-eval's words. A policy's relative settings are
            relative to it. None: the model's context is the limit, and each width has a capacity of its own.
        batch_size: contexts that are prefilled together.
        prefill: how a context's tokens attend to each other, as `--prefill` of `jshadow eval`.
        fitted: a file of arrays that the policy learned (`jshadow fit`).
        max_gen_toks: tokens of a generation whose task does not say.
        truncation: "middle" cuts a context that is too long in its middle, and warns with the count; None: that is an
            error.
        rolling_context: tokens before each window but the first of a rolling log-likelihood, which are prefilled and
            compressed. `hf` uses 1. A policy that keeps new tokens exactly changes nothing there.
        add_bos_token: whether text gets the tokenizer's special tokens; None: as the tokenizer has it.
        prefix_token_id: what stands before an empty context; None: the BOS token, or else the EOS token.
        seed: of sampled generations.
        max_batch_size: only None: there is no search for a batch size.
        device: not read. lm-eval's command line passes "cuda:0" by default; JAX chooses (`JAX_PLATFORMS`).
    """

    dtype: str = "bfloat16"
    quantize: str | None = None
    fetch: str = "auto"
    capacity: int | None = None
    batch_size: int | str | None = 1
    prefill: str = "exact"
    fitted: str | None = None
    max_gen_toks: int = 256
    truncation: str | None = None
    rolling_context: int = 1
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    seed: int = 0
    max_batch_size: Any = None
    device: Any = None

    @classmethod
    def split(cls, arguments: Mapping[str, Any]) -> tuple["ModelArguments", dict[str, Any]]:
        """The arguments that are fields, and the others: settings of a policy."""
        names = {field.name for field in dataclasses.fields(cls)}
        settings = {name: value for name, value in arguments.items() if name not in names}
        return cls(**{name: value for name, value in arguments.items() if name in names}), settings


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
