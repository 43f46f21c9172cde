"""`jshadow fit` and `jshadow calibrate`: learn the arrays or the settings of a policy from a text."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import SlowProgress, check_writable, read_text, show_table
from jshadow.cli.fields import Command, option
from jshadow.cli.options import MODEL_HELP, WeightOptions, check_least
from jshadow.errors import ConfigError

_LONGEST = 64  # characters of a token on average, at most: a longer text is cut before it is encoded
LEARNERS = ("infinigen", "less", "loki")  # a test compares them with the policies that learn


@dataclasses.dataclass(kw_only=True)
class _TextCommand(WeightOptions, CacheOptions, Command):
    model: str = option(MODEL_HELP, positional=True, required=True)
    text: str = option("a UTF-8 text to learn from", metavar="FILE", required=True)
    tokens: int = option("tokens of the text, at most", 2048)

    def load_with_text(self) -> tuple[Any, list[int]]:
        """Return the model, and up to twice --tokens token ids of the text. The second half is for a check.

        Errors that do not depend on the model are raised before it is loaded.
        """
        from jshadow.engine.text import encode
        from jshadow.weights.convert.files import quiet_transformers
        from jshadow.weights.params import load

        check_least(self, 1, "tokens")
        text = read_text(self.text, "--text")
        params = load(self.model, dtype=self.dtype, quantize=self.quantize)
        with quiet_transformers():  # transformers warns about a text that is longer than the context
            ids = encode(params.tokenizer, text[: 2 * self.tokens * _LONGEST], params.config.vocab_size)
        return params, ids[: 2 * self.tokens]


@dataclasses.dataclass(kw_only=True)
class Fit(_TextCommand):
    """Learn the arrays of a policy from a text and write them to a file.

    The file is a safetensors file, for `jshadow generate --fitted FILE`. loki and infinigen take a basis of each head
    from it; less trains its kernels, layer by layer, which takes a while, and prints how far each layer is from full
    attention on the rest of the text.
    """

    policy: str = option(f"one of {', '.join(LEARNERS)}", required=True)
    set: Sequence[str] = option("a setting of the policy (repeatable)", (), metavar="KEY=VALUE")
    steps: int | None = option("less: training steps of a layer (default: 400)")
    seed: int | None = option("less: seed of the first weights and the draws (default: 0)")
    out: str = option("safetensors file to write", metavar="FILE", required=True)

    def run(self) -> int:
        """Return 0 when the file is written."""
        import numpy as np

        from jshadow.engine.saved.fitted import save_fitted
        from jshadow.policies import Wrapper, parse_policy
        from jshadow.policies.capabilities import Learns, Trains, capability, with_fitted

        policy = parse_policy(self.policy, self.set)
        if isinstance(policy, Wrapper):
            raise ConfigError(
                f"--set must be settings of {self.policy} itself, whose arrays any wrapper can use, got {self.set}"
            )
        policy = with_fitted(policy)
        learner = capability(policy, Learns)
        if learner is None:
            raise ConfigError(f"--policy must be one that learns, of {list(LEARNERS)}, got {self.policy!r}")
        options = {name: getattr(self, name) for name in ("steps", "seed") if getattr(self, name) is not None}
        if options and not isinstance(learner, Trains):
            raise ConfigError(f"--{next(iter(options))} must be left out for {self.policy}, which takes no steps")
        if not 0 <= options.get("seed", 0) < 2**31:
            raise ConfigError(f"--seed must be in [0, 2^31), got {self.seed}")
        check_writable(self.out, "--out")
        params, ids = self.load_with_text()
        ids, rest = ids[: self.tokens], ids[self.tokens :]
        policy.resolve(params.config, len(ids))
        begun, text = time.perf_counter(), np.asarray(ids, np.int32)
        fit: Callable[..., Any] = learner.fit
        with SlowProgress(f"fitting {policy.name}") as bar:
            fitted = fit(params, text, progress=bar, **options)
        seconds = time.perf_counter() - begun
        save_fitted(self.out, fitted, policy, params, about={"text": str(self.text), "tokens": len(ids)} | options)
        size = Path(self.out).expanduser().stat().st_size
        errors = _held_out_errors(policy, params, rest, fitted)
        if self.json:
            told = {"policy": self.policy, "tokens": len(ids), "seconds": seconds, "out": str(self.out)}
            print(json.dumps(told | {"nbytes": size, "errors": errors}))
            return 0
        print(f"{self.out}: {size:,} bytes, learned from {len(ids):,} tokens in {seconds:.1f} s")
        if errors:
            rows = [(str(row["layer"]), f"{row['sparse']:.4f}", f"{row['fitted']:.4f}") for row in errors]
            title = f"held out, the next {len(rest):,} tokens"
            show_table(["layer", "h2o's error", "less's error"], rows, width=100, title=title)
        return 0


@dataclasses.dataclass(kw_only=True)
class Calibrate(_TextCommand):
    """Find the layers of a model that serve best as OmniKV's filters.

    The score of a layer is the share of later layers' attention that falls on the tokens this layer attends to most.
    Prints the setting for --set.
    """

    filters: int = option("filter layers to choose", 3)
    budget: int | None = option("tokens that a filter chooses (default: a sixteenth of the text)")

    def run(self) -> int:
        """Return 0 when the layers are measured."""
        import numpy as np

        from jshadow.policies.omnikv import choose_filters, dense_share, filter_masses

        check_least(self, 1, "filters", "budget")
        params, ids = self.load_with_text()
        ids = ids[: self.tokens]
        budget = max(1, len(ids) // 16) if self.budget is None else self.budget
        with SlowProgress("measuring attention") as bar:
            masses = filter_masses(params, np.asarray(ids), budget=budget, progress=bar)
        chosen = choose_filters(masses, self.filters)
        dense = dense_share(chosen, params.config)
        scores = {layer: float(one) for layer, one in zip(masses.layers, masses.scores, strict=True) if one == one}
        setting = "filter_layers=" + ",".join(map(str, chosen))
        if self.json:
            told: dict[str, Any] = {"filter_layers": list(chosen), "set": setting, "budget": budget, "tokens": len(ids)}
            told["scores"] = [{"layer": layer, "score": score} for layer, score in scores.items()]
            print(json.dumps(told | {"dense_share": dense}))
            return 0
        show_table(
            ["layer", "attention of later layers on its top tokens", ""],
            [(str(layer), f"{score:.4f}", "filter" if layer in chosen else "") for layer, score in scores.items()],
            width=100,
            title=f"{len(ids):,} tokens, top {budget:,}",
        )
        print(f"dense layers: {dense:.0%}\n--policy omnikv --set {setting}")
        return 0


def _held_out_errors(policy: Any, params: Any, rest: list[int], fitted: Any) -> list[dict[str, float]] | None:
    """Measure the relative squared error of each layer on the rest of the text, for LESS."""
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
