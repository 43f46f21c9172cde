"""Turning settings of lm-evaluation-harness, from a task or the command line, into settings of jshadow."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError
from jshadow.policies import Policy, parse_policy

MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # four names of one setting
FILTERS = ("top_k", "top_p", "min_p")
KEYS = {"until", "num_beams", "do_sample", "temperature", *MAX_TOKENS, *FILTERS}


@dataclasses.dataclass(frozen=True)
class ModelArguments:
    """The arguments of lm-eval's `--model_args` that are not settings of a policy.

    Attributes:
        dtype: see `jshadow.load`. It is ignored for Params.
        quantize: see `jshadow.load`. It is ignored for Params.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        capacity: maximum number of tokens of a request, which lm-eval calls `max_length`. Settings of a policy may
            depend on it. None means that the model's context is the limit and each width has its own capacity.
        batch_size: maximum number of contexts that are prefilled together.
        prefill: the attention between the tokens of a context, as for `--prefill` of `jshadow eval`.
        fitted: a file of arrays that the policy has learned (`jshadow fit`).
        max_gen_toks: maximum number of new tokens if a task does not set it.
        truncation: "middle" removes tokens from the middle of a context that is too long, and logs a warning. None
            raises an error.
        rolling_context: number of tokens before each window of a rolling log-likelihood, except the first. They are
            prefilled and compressed. `hf` uses 1. With 1, a policy that keeps all new tokens equals full attention.
        add_bos_token: whether special tokens are added to a text. None means the default of the tokenizer.
        prefix_token_id: the token that replaces an empty context. None means the BOS token, or the EOS token if there
            is no BOS token.
        seed: seed of sampled generations.
        max_batch_size: must be None, because there is no search for a batch size.
        device: ignored. lm-eval passes "cuda:0" by default, but JAX chooses the device (`JAX_PLATFORMS`).
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
        """Split arguments into the fields of this class and the remaining ones, which are settings of a policy."""
        names = {field.name for field in dataclasses.fields(cls)}
        settings = {name: value for name, value in arguments.items() if name not in names}
        return cls(**{name: value for name, value in arguments.items() if name in names}), settings


def whole(name: str, value: Any) -> int:
    """Read an integer of at least 1 from a number or its text. Raises a ConfigError that names `name`."""
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
    return value


def policy_of(policy: str | Policy, settings: dict[str, Any]) -> Policy:
    """Build a policy from its name and settings. Raises a ConfigError that names an unknown policy or setting."""
    if isinstance(policy, Policy):
        if settings:
            raise ConfigError(f"settings must be left out if policy is a Policy, got {sorted(settings)}")
        return policy
    texts = [f"{name}={'null' if value is None else value}" for name, value in settings.items()]
    return parse_policy(policy, texts)


def parse_generation(settings: dict[str, Any], default: int) -> tuple[Sampler, int, tuple[str, ...]]:
    """Read the generation settings of a task.

    Tokens are sampled if `do_sample` is true, or if it is missing and the temperature is above 0. Otherwise generation
    is greedy. The default temperature of sampling is 1.

    Returns:
        The sampler, the maximum number of new tokens, and the stop strings.

    Raises:
        ConfigError: a key is unknown, two keys have the same meaning, beam search is requested, or a value is out of
            range.
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
    """Return the ids of those stop strings that are special tokens. Decoded text does not contain special tokens."""
    ids = {text: tokenizer.convert_tokens_to_ids(text) for text in texts}
    return [ids[text] for text in ids if ids[text] in tokenizer.all_special_ids]
