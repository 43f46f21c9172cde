"""Options that several commands share."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.mesh import placed

if TYPE_CHECKING:
    from jshadow.engine.sampling import Sampler
    from jshadow.policies import Policy

JSON_HELP = "print one JSON object instead of text"
FETCH_HELP = "auto, resident, device_put or zero_copy (default: %(default)s)"
PREFILL_HELP = "exact (default), vertical_slash or a_shape: how the prompt's tokens attend to each other"


def add_weights_options(add: argparse._ActionsContainer) -> None:
    """Add --dtype and --quantize."""
    add.add_argument("--dtype", default="bfloat16", help="dtype of weights, keys and values (default: %(default)s)")
    add.add_argument("--quantize", help="int8: keep the projections' weights in int8")


def add_policy_options(add: argparse._ActionsContainer) -> None:
    """Add --policy, --set, --fitted, --prefill and --fetch."""
    add.add_argument("--policy", help="policy name, or module:Class (default: shadowkv; see `jshadow policies`)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument(
        "--fitted", metavar="FILE", help="arrays that `jshadow fit` wrote; without --policy, their policy is used"
    )
    add.add_argument("--prefill", metavar="NAME[:KEY=VALUE...]", help=PREFILL_HELP)
    add.add_argument("--fetch", default="auto", help=FETCH_HELP)


def add_sampling_options(add: argparse.ArgumentParser) -> None:
    """Add --temperature, --top-k, --top-p, --min-p and --seed."""
    add.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add.add_argument("--top-k", type=int, help="draw from this many likeliest tokens")
    add.add_argument("--top-p", type=float, help="draw from the likeliest tokens that have this probability together")
    add.add_argument("--min-p", type=float, help="draw from tokens with this share of the likeliest one's probability")
    add.add_argument("--seed", type=int, default=0, help="seed of the draws (default: %(default)s)")


def sampler_of(args: argparse.Namespace) -> "Sampler":
    """Return the sampler of the sampling options. Raises ConfigError for a value out of range."""
    from jshadow.engine.sampling import Sampler

    return Sampler(args.temperature, args.top_k, args.top_p, args.min_p)


def policy_of(args: argparse.Namespace) -> "Policy":
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
    return parse_policy(learner["name"], settings + args.set)


def check_fetch(fetch: str) -> None:
    """Raise ConfigError for an unknown fetch mode. "auto" is not resolved, so that no backend is started."""
    from jshadow.cache.offload import resolve_fetch

    if fetch != "auto":
        resolve_fetch(fetch)


def check_fitted_file(path: str | None) -> None:
    """Raise CheckpointError unless the header of a file of learned arrays can be read. None means no file."""
    from jshadow.engine.saved.fitted import read_fitted_info

    if path is not None:
        read_fitted_info(Path(path).expanduser())


def load_model(args: argparse.Namespace) -> Any:
    """Return the Params (weights and tokenizer) of the model that the options name."""
    from jshadow.weights.params import load

    return load(args.model, dtype=args.dtype, quantize=args.quantize, **placed(args))
