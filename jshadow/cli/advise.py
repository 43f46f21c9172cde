"""`jshadow advise`: the cheapest policy that answers as full attention does on the user's own documents."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import SlowProgress, console, print_table, read_text
from jshadow.cli.eval import split_policies
from jshadow.cli.fields import Command, option
from jshadow.cli.options import MODEL_HELP, WeightOptions, load_model, model_mark
from jshadow.errors import ConfigError
from jshadow.planner.gpu_specs import GPUS, gpu_named

if TYPE_CHECKING:
    from rich.console import Console

    from jshadow.evaluation.advice import Advice, Judged, Kept

SETTINGS_FILE, PAGE_FILE = "settings.toml", "advice.html"


@dataclasses.dataclass(kw_only=True)
class Advise(WeightOptions, CacheOptions, Command):
    """Find the cheapest policy that answers as full attention does on your own documents.

    Full attention and other policies read each document. They then continue passages of it, or answer your questions,
    and their predictions are compared. If KL is the divergence from full attention, a policy keeps the share
    exp(-KL) of it. Half of the passages or questions choose the policy, and the other half judge it.
    """

    model: str = option(MODEL_HELP, positional=True, required=True)
    file: Sequence[str] = option("a UTF-8 file with a document (repeatable)", (), metavar="FILE")
    questions: str | None = option(
        "a file with questions about each document, one a line (default: passages are continued)", metavar="FILE"
    )
    target: float = option("share of full attention to keep, above 0 and at most 1", 0.99)
    policies: str | None = option(
        "NAME or NAME:key=value:..., comma list (default: a dozen settings, from the cheapest on, until one keeps the "
        "target)"
    )
    gpu: str | None = option(f"also predict the speed on one of {', '.join(GPUS)}")
    out: str | None = option(
        f"directory for {SETTINGS_FILE} (for --settings of generate, chat and serve), {PAGE_FILE}, and the result of "
        "each document, which a later call reuses",
        metavar="DIR",
    )

    def run(self) -> int:
        """Return 0 when the policy is chosen."""
        from jshadow.evaluation.advice import advise, check_target
        from jshadow.policies import parse_policy, split_policy

        if not self.file:
            raise ConfigError("--file must be given at least once, got none")
        check_target("--target", self.target)
        gpu = None if self.gpu is None else gpu_named(self.gpu)
        documents = {path: read_text(path, "--file") for path in self.file}
        text = "" if self.questions is None else read_text(self.questions, "--questions")
        policies = None
        if self.policies is not None:
            policies = [parse_policy(*split_policy(one)) for one in split_policies(self.policies)]
        params = load_model(self)
        with SlowProgress("documents") as progress:
            advice = advise(
                params,
                documents,
                questions=[line.strip() for line in text.splitlines() if line.strip()],
                target=self.target,
                policies=policies,
                out=self.out,
                progress=progress,
            )
        speeds = None if gpu is None else _speeds(params.config, advice, gpu)
        if self.out is not None:
            _write(self, advice, speeds, params.config)
        if self.json:
            told = advice.to_json() | ({} if speeds is None else {"gpu": self.gpu, "speeds": speeds})
            print(json.dumps(told))
        else:
            _show(advice, speeds, console(140))
        return 0


def _speeds(config: Any, advice: "Advice", gpu: Any) -> dict[str, tuple[int, float | None]]:
    """Return how many requests of the longest document fit, and their predicted tokens per second, by policy."""
    from jshadow.evaluation.plan import label
    from jshadow.planner.bytes import Workload
    from jshadow.planner.gpu import capacity_plan

    beside = {label(one.policy): one.policy for one in advice.judged}
    plan = capacity_plan(config, advice.best.policy, gpu, Workload(advice.tokens, fetch="auto"), beside=beside)
    return {
        name: (side.largest_batch, None if side.step is None else side.step.tokens_per_second)
        for name, side in plan.beside.items()
    }


def _kept(one: "Kept") -> str:
    return f"{one.share:.4f} ({one.low:.4f} to {one.high:.4f})"


def _show(advice: "Advice", speeds: dict[str, tuple[int, float | None]] | None, out: "Console") -> None:
    """Print the table of all policies, and the verdict."""
    from rich.table import Table

    from jshadow.evaluation.plan import label

    head = ["", "device bytes", "of full %", "keeps, chosen by", "keeps, held out", "the same"]
    head += [] if speeds is None else ["requests", "tokens/s"]
    table = Table(title=f"What policies keep of full attention, at up to {advice.tokens:,} tokens")
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for one in advice.judged:
        both = one.chosen_by, one.held_out
        cells = [f"{one.device_bytes:,}", f"{100 * one.device_bytes / one.full_bytes:.1f}", *map(_kept, both)]
        cells.append(f"{sum(half.same for half in both)} of {sum(half.probes for half in both)}")
        if speeds is not None:
            requests, speed = speeds[label(one.policy)]
            cells += [f"{requests:,}", "-" if speed is None else f"{speed:,.0f}"]
        mark = "→ " if one is advice.best else ""
        table.add_row(mark + label(one.policy), *cells)
    print_table(table, out)
    for sentence in sentences(advice, predicted=speeds is not None):
        out.print(sentence, highlight=False)


def sentences(advice: "Advice", *, predicted: bool = False) -> list[str]:
    """Return the verdict, and what a reader of the table needs to know."""
    from jshadow.evaluation.plan import label
    from jshadow.policies import Full

    best, target = advice.best, f"{advice.target:g}"
    if isinstance(best.policy, Full):
        verdict = f"Full attention. No cheaper policy keeps {target} of it on these documents."
    else:
        share = 100 * best.device_bytes / best.full_bytes
        verdict = f"{label(best.policy)} is the cheapest that keeps {target}, with {share:.1f} % of the device bytes."
        held = best.held_out
        verdict += f" On the half that did not choose it, it keeps {_kept(held)}."
        if held.share < advice.target:
            verdict += f" That is below {target}, so take the next one or more documents."
    if advice.untried:
        verdict += (
            f" {advice.untried} settings with more device bytes were not tried; --policies runs all that it names."
        )
    told = [
        verdict,
        "Device bytes are those of one request in bfloat16, with values on the host where the policy puts them there. "
        "The intervals are 95 % of a bootstrap. A policy is chosen if the low end of its interval keeps the target.",
    ]
    return [*told, "The speed is predicted for the most requests that fit, not measured."] if predicted else told


def _write(args: Advise, advice: "Advice", speeds: Any, config: Any) -> None:
    """Write the settings file and the page, each whole or not at all."""
    import io

    from rich.console import Console

    from jshadow.evaluation.data import whole_file

    assert args.out is not None
    page = Console(record=True, file=io.StringIO(), width=150)
    _show(advice, speeds, page)
    for name, content in ((SETTINGS_FILE, _settings(args, advice.best, config)), (PAGE_FILE, page.export_html())):
        with whole_file(Path(args.out) / name, "--out") as part:
            part.write_text(content, encoding="utf-8")


def _settings(args: Advise, best: "Judged", config: Any) -> str:
    """Return a settings file of the policy. Its values are JSON strings, which TOML reads too."""
    from jshadow.policies.settings import changed_settings

    settings = [f"{name}={json.dumps(value)}" for name, value in changed_settings(best.policy).items()]
    lines = [f"# keeps {_kept(best.held_out)} of full attention on {', '.join(args.file)}"]
    lines += [f"for-model = {json.dumps(model_mark(config))}", f"policy = {json.dumps(best.policy.name)}"]
    return "\n".join([*lines, f"set = {json.dumps(settings)}", ""])
