"""Options that several commands share."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jshadow.cli.fields import option
from jshadow.cli.processes import placed
from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jshadow.engine.sampling import Sampler
    from jshadow.models.config import ModelConfig
    from jshadow.policies import Policy

MODEL_HELP = "HF directory, .gguf file, or hub id"
FETCH_HELP = "auto, resident, device_put or zero_copy"
PREFILL_HELP = "exact (default), vertical_slash or a_shape: how the prompt's tokens attend to each other"


@dataclasses.dataclass(kw_only=True)
class PolicyOptions:
    """A policy with its settings and its learned arrays."""

    title: ClassVar[str] = "method"
    policy: str | None = option("policy name, or module:Class (default: shadowkv; see `jshadow policies`)")
    set: Sequence[str] = option("a setting of the policy (repeatable)", (), metavar="KEY=VALUE")
    for_model: str | None = option(
        "the model of these settings; another is refused (`jshadow advise` writes it)", metavar="MARK"
    )
    fitted: str | None = option(
        "arrays that `jshadow fit` wrote; without --policy, their policy is used", metavar="FILE"
    )


@dataclasses.dataclass(kw_only=True)
class MethodOptions(PolicyOptions):
    """A policy, and how a prompt is read with it."""

    title: ClassVar[str] = "method"
    prefill: str | None = option(PREFILL_HELP, metavar="NAME[:KEY=VALUE...]")
    fetch: str = option(FETCH_HELP, "auto")


@dataclasses.dataclass(kw_only=True)
class SamplingOptions:
    """How tokens are drawn."""

    title: ClassVar[str] = "sampling"
    temperature: float = option("0 is greedy (default)", 0.0)
    top_k: int | None = option("draw from this many likeliest tokens")
    top_p: float | None = option("draw from the likeliest tokens that have this probability together")
    min_p: float | None = option("draw from tokens with this share of the likeliest one's probability")
    seed: int = option("seed of the draws", 0)


@dataclasses.dataclass(kw_only=True)
class WeightOptions:
    """How the weights of a model are held."""

    title: ClassVar[str] = "weights"
    dtype: str = option("dtype of weights, keys and values", "bfloat16")
    quantize: str | None = option("int8, fp8 or int4: keep the projections' weights in that type")


def sampler_of(args: SamplingOptions) -> "Sampler":
    """Return the sampler of the sampling options. Raises ConfigError for a value out of range."""
    from jshadow.engine.sampling import Sampler

    return Sampler(args.temperature, args.top_k, args.top_p, args.min_p)


def policy_of(args: PolicyOptions) -> "Policy":
    """Return the policy of --policy and --set.

    If only --fitted is given, it is the policy that learned the arrays.

    Raises:
        ConfigError: a policy or a setting is unknown.
        CheckpointError: the file of --fitted cannot be read.
    """
    from jshadow.policies import parse_policy

    if args.fitted is None or args.policy is not None:
        return parse_policy(args.policy or "shadowkv", args.set)
    from jshadow.engine.saved.fitted import read_fitted_info

    learner = read_fitted_info(args.fitted)["policy"]
    settings = [f"{key}={json.dumps(value)}" for key, value in learner["settings"].items()]
    return parse_policy(learner["name"], [*settings, *args.set])


def fitted_of(args: PolicyOptions, params: Any, policy: "Policy") -> Any:
    """Return the arrays of --fitted, or None without it. Raises the errors of `load_fitted`."""
    from jshadow.engine.saved.fitted import load_fitted

    return None if args.fitted is None else load_fitted(args.fitted, params, policy)


def check_method(fetch: str, fitted: str | None) -> None:
    """Check --fetch and --fitted before the model is loaded.

    Raises:
        ConfigError: the fetch mode is unknown.
        CheckpointError: the header of the file of learned arrays cannot be read.
    """
    from jshadow.cache.offload import check_fetch
    from jshadow.engine.saved.fitted import read_fitted_info

    check_fetch(fetch)
    if fitted is not None:
        read_fitted_info(Path(fitted).expanduser())


def check_least(args: Any, least: float, *names: str, above: bool = False, finite: bool = False) -> None:
    """Raise ConfigError for an option below `least`, equal to it if `above`, or infinite if `finite`. None is right."""
    for name in names:
        value = getattr(args, name)
        if value is None or ((least < value if above else least <= value) and not (finite and value == float("inf"))):
            continue
        limit = f"above {least:g}" if above else f"at least {least:g}"
        limit += " and finite" if finite else ""
        raise ConfigError(f"--{name.replace('_', '-')} must be {limit}, got {value!r}")


def model_mark(config: "ModelConfig") -> str:
    """Return a short name of a model's config, which tells models of different sizes or settings apart."""
    digest = hashlib.sha256(repr(config).encode()).hexdigest()[:8]
    return f"{config.model_type}-{config.num_layers}x{config.model_dim}-{digest}"


def load_model(args: Any) -> Any:
    """Return the Params (weights and tokenizer) of the model that the options name.

    Raises ConfigError if the settings are for another model (`model_mark`).
    """
    from jshadow.weights.params import load

    params = load(args.model, dtype=args.dtype, quantize=args.quantize, **placed(args))
    wanted, mark = getattr(args, "for_model", None), model_mark(params.config)
    if wanted not in (None, mark):
        raise ConfigError(f"--for-model must be the mark of the model, {mark}, got {wanted!r}")
    return params
