"""`jshadow fit` and `jshadow calibrate`: learn the arrays or the settings of a policy from a text."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.console import console
from jshadow.cli.files import check_writable, read_text
from jshadow.cli.options import JSON_HELP, add_weights_options
from jshadow.cli.progress import SlowProgress
from jshadow.errors import ConfigError

LONGEST = 64  # characters of a token on average, at most: a longer text is cut before it is encoded
LEARNERS = ("infinigen", "less", "loki")  # a test compares them with the policies that learn
ABOUT_FIT = """Learn the arrays of a policy from a text and write them to a safetensors file, for
`jshadow generate --fitted FILE`. loki and infinigen take a basis of each head from it; less trains its kernels, layer
by layer, which takes a while, and prints how far each layer is from full attention on the rest of the text."""
ABOUT_CALIBRATE = """Find the layers of a model that serve best as OmniKV's filters. The score of a layer is the share
of later layers' attention that falls on the tokens this layer attends to most. Prints the setting for --set."""


def add_fit_options(add: argparse.ArgumentParser) -> None:
    """Add the options of `fit`."""
    add.set_defaults(run=run_fit)
    add.add_argument("--policy", required=True, help=f"one of {', '.join(LEARNERS)}")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument("--steps", type=int, help="less: training steps of a layer (default: 400)")
    add.add_argument("--seed", type=int, help="less: seed of the first weights and the draws (default: 0)")
    add.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write")
    add_text_options(add)


def add_calibrate_options(add: argparse.ArgumentParser) -> None:
    """Add the options of `calibrate`."""
    add.set_defaults(run=run_calibrate)
    add.add_argument("--filters", type=int, default=3, help="filter layers to choose (default: %(default)s)")
    add.add_argument("--budget", type=int, help="tokens that a filter chooses (default: a sixteenth of the text)")
    add_text_options(add)


def add_text_options(add: argparse.ArgumentParser) -> None:
    """Add the options for a model and a text that both commands have."""
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("--text", required=True, metavar="FILE", help="a UTF-8 text to learn from")
    add.add_argument("--tokens", type=int, default=2048, help="tokens of the text, at most (default: %(default)s)")
    add_weights_options(add)
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def load_with_text(args: argparse.Namespace) -> tuple[Any, list[int]]:
    """Return the model, and up to twice --tokens token ids of the text. The second half is for a check.

    Errors that do not depend on the model are raised before it is loaded.
    """
    from jshadow.engine.text import encode
    from jshadow.weights.convert.quiet import quiet_transformers
    from jshadow.weights.params import load

    if args.tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {args.tokens}")
    text = read_text(args.text, "--text")
    params = load(args.model, dtype=args.dtype, quantize=args.quantize)
    with quiet_transformers():  # transformers warns about a text that is longer than the context
        ids = encode(params.tokenizer, text[: 2 * args.tokens * LONGEST], params.config.vocab_size)
    return params, ids[: 2 * args.tokens]


def run_fit(args: argparse.Namespace) -> int:
    """Run `jshadow fit`, and return 0 when the file is written."""
    import numpy as np

    from jshadow.engine.saved.fitted import save_fitted
    from jshadow.policies import Wrapper, parse_policy
    from jshadow.policies.capabilities import Learns, Trains, capability, with_fitted

    policy = parse_policy(args.policy, args.set)
    if isinstance(policy, Wrapper):
        raise ConfigError(
            f"--set must be settings of {args.policy} itself, whose arrays any wrapper can use, got {args.set}"
        )
    policy = with_fitted(policy)
    learner = capability(policy, Learns)
    if learner is None:
        raise ConfigError(f"--policy must be one that learns, of {list(LEARNERS)}, got {args.policy!r}")
    options = {name: getattr(args, name) for name in ("steps", "seed") if getattr(args, name) is not None}
    if options and not isinstance(learner, Trains):
        raise ConfigError(f"--{next(iter(options))} must be left out for {args.policy}, which takes no steps")
    if not 0 <= options.get("seed", 0) < 2**31:
        raise ConfigError(f"--seed must be in [0, 2^31), got {args.seed}")
    check_writable(args.out, "--out")
    params, ids = load_with_text(args)
    ids, rest = ids[: args.tokens], ids[args.tokens :]
    policy.resolve(params.config, len(ids))
    assert learner is not None
    fit: Callable[..., Any] = learner.fit
    begun = time.perf_counter()
    text = np.asarray(ids, np.int32)
    fitted = with_bar(f"fitting {policy.name}", lambda bar: fit(params, text, progress=bar, **options))
    summary: dict[str, Any] = {
        "policy": args.policy,
        "tokens": len(ids),
        "seconds": time.perf_counter() - begun,
        "out": str(args.out),
    }
    save_fitted(args.out, fitted, policy, params, about={"text": str(args.text), "tokens": len(ids)} | options)
    summary["nbytes"] = Path(args.out).expanduser().stat().st_size
    summary["errors"] = held_out_errors(policy, params, rest, fitted)
    if args.json:
        print(json.dumps(summary))
        return 0
    print(f"{args.out}: {summary['nbytes']:,} bytes, learned from {len(ids):,} tokens in {summary['seconds']:.1f} s")
    if summary["errors"]:
        from rich.table import Table

        table = Table("layer", "h2o's error", "less's error", title=f"held out, the next {len(rest):,} tokens")
        for row in summary["errors"]:
            table.add_row(str(row["layer"]), f"{row['sparse']:.4f}", f"{row['fitted']:.4f}")
        console(100).print(table)
    return 0


def held_out_errors(policy: Any, params: Any, rest: list[int], fitted: Any) -> list[dict[str, float]] | None:
    """Measure the relative squared error of each layer on the rest of the text, for LESS.

    Returns:
        {"layer", "sparse", "fitted"} for each layer: the errors without and with the learned kernels. None for other
        policies, and if too little text is left.
    """
    import numpy as np

    from jshadow.policies.capabilities import Trains, capability
    from jshadow.policies.less.training import errors_of

    if capability(policy, Trains) is None:
        return None
    if len(rest) < 2 or policy.resolve(params.config, len(rest)).budget(len(rest)) + 1 >= len(rest):
        return None
    errors = errors_of(policy, params, np.asarray(rest), fitted)
    return [
        {"layer": layer, "sparse": float(row[0]), "fitted": float(row[1])}
        for layer, row in enumerate(errors)
        if not np.isnan(row[0])
    ]


def run_calibrate(args: argparse.Namespace) -> int:
    """Run `jshadow calibrate`, and return 0 when the layers are measured."""
    import numpy as np
    from rich.table import Table

    from jshadow.policies.omnikv import choose_filters, dense_share, filter_masses

    for name in ("filters", "budget"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, got {value}")
    params, ids = load_with_text(args)
    ids = ids[: args.tokens]
    budget = max(1, len(ids) // 16) if args.budget is None else args.budget
    masses = with_bar(
        "measuring attention", lambda bar: filter_masses(params, np.asarray(ids), budget=budget, progress=bar)
    )
    chosen = choose_filters(masses, args.filters)
    scores = {layer: float(score) for layer, score in zip(masses.layers, masses.scores, strict=True) if score == score}
    setting = "filter_layers=" + ",".join(map(str, chosen))
    if args.json:
        summary = {
            "filter_layers": list(chosen),
            "set": setting,
            "budget": budget,
            "tokens": len(ids),
            "scores": [{"layer": layer, "score": score} for layer, score in scores.items()],
            "dense_share": dense_share(chosen, params.config),
        }
        print(json.dumps(summary))
        return 0
    table = Table(
        "layer", "attention of later layers on its top tokens", "", title=f"{len(ids):,} tokens, top {budget:,}"
    )
    for layer, score in scores.items():
        table.add_row(str(layer), f"{score:.4f}", "filter" if layer in chosen else "")
    console(100).print(table)
    print(f"dense layers: {dense_share(chosen, params.config):.0%}\n--policy omnikv --set {setting}")
    return 0


def with_bar(title: str, work: Callable[[SlowProgress], Any]) -> Any:
    """Return the result of `work`, which is called with a progress bar."""
    with SlowProgress(title) as progress:
        return work(progress)
