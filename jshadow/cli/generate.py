"""`jshadow generate`: its options, and how an answer and its figures are printed."""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from jshadow.cli.console import console
from jshadow.cli.progress import SlowProgress, waiting
from jshadow.errors import ConfigError, PromptError
from jshadow.policies import parse_policy

if TYPE_CHECKING:
    from jshadow.engine.result import Generation

PREFILL_HELP = "exact (default), vertical_slash, a_shape or block_sparse: how the prompt's tokens attend to each other"
SPARE = 1024  # tokens that can still be added to a saved state, unless --capacity says otherwise


def add_options(add: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add.set_defaults(run=run_generate)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("source", nargs="?", choices=["-"], help="read the prompt from standard input")
    add.add_argument("--prompt", help="the prompt")
    add.add_argument("--prompt-file", help="a UTF-8 file with the prompt")
    add.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    add.add_argument("--policy", help="policy name (default: shadowkv; see `jshadow policies`)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument("--fitted", metavar="FILE", help="arrays of `jshadow fit`; without --policy: and their policy")
    add.add_argument("--baseline", metavar="POLICY", help="run this policy first and show both side by side")
    add.add_argument("--prefill", metavar="NAME[:KEY=VALUE...]", help=PREFILL_HELP)
    add.add_argument("--fetch", default="auto", help="auto, resident, device_put or zero_copy (default: %(default)s)")
    add.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s; 0 only saves the state")
    add.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add.add_argument("--top-k", type=int)
    add.add_argument("--top-p", type=float)
    add.add_argument("--min-p", type=float)
    add.add_argument("--seed", type=int, default=0)
    add.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text (repeatable)")
    add.add_argument("--capacity", type=int, help="tokens to allocate (default: what is needed, rounded up)")
    add.add_argument(
        "--save-state", metavar="FILE", help=f"save the KV state afterwards, with room for {SPARE:,} tokens"
    )
    add.add_argument("--load-state", metavar="FILE", help="go on from a saved state: the prompt is its next turn")
    add.add_argument("--verify", action="store_true", help="check each step against the resident path (slow)")
    add.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    add.add_argument("--quantize", help="int8: keep the projections' weights in int8")
    add.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def read_prompt(args: argparse.Namespace) -> str:
    """The prompt from --prompt, --prompt-file or standard input. Raises PromptError where it cannot be read."""
    sources = [args.prompt is not None, args.prompt_file is not None, args.source is not None]
    if sum(sources) != 1:
        raise PromptError("prompt must come from exactly one of --prompt, --prompt-file and '-' (standard input)")
    try:
        text = args.prompt if args.prompt is not None else ""
        text = sys.stdin.read() if args.source else text
        text = Path(args.prompt_file).read_text(encoding="utf-8") if args.prompt_file is not None else text
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt must be readable UTF-8 text: {error}") from error
    if not text.strip():
        raise PromptError(f"prompt must have text in it, got {text!r:.20}")
    return text


def run_generate(args: argparse.Namespace) -> int:
    """`jshadow generate`."""
    from jshadow.engine.fitted_arrays import load_fitted
    from jshadow.engine.sampling import Sampler
    from jshadow.engine.sparse_prefill import parse_prefill
    from jshadow.weights.params import load  # slow imports are done by the commands that need them, not by --help

    text = read_prompt(args)
    check_options(args)
    policies: list[Any] = [asked_policy(args)] if args.load_state is None else [None]
    if args.baseline:
        policies.insert(0, parse_policy(args.baseline, []))
    prefill = parse_prefill(args.prefill or "exact")
    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.min_p)
    params = load(args.model, dtype=args.dtype, quantize=args.quantize)
    prompt: Any = [{"role": "user", "content": text}] if args.chat else text
    learned: list[Any] = [None] * len(policies)
    if args.fitted is not None:
        learned[-1] = load_fitted(args.fitted, params, policies[-1])
    several = len(policies) > 1
    questions = [
        Question(prompt, policy, sampler, prefill, fitted, labelled=several)
        for policy, fitted in zip(policies, learned, strict=True)
    ]
    results = [answer(args, params, question) for question in questions]
    if args.json:
        print(json.dumps({"results": [to_json(one) for one in results]}))
    else:
        console(100).print(figures(results))
    return 0


def asked_policy(args: argparse.Namespace) -> Any:
    """The policy of --policy and --set. With --fitted alone: the policy that learned the arrays, with its settings."""
    if args.fitted is None or args.policy is not None:
        return parse_policy(args.policy or "shadowkv", args.set)
    from jshadow.engine.fitted_arrays import read_fitted_info

    learner = read_fitted_info(args.fitted)["policy"]
    settings = [f"{key}={json.dumps(value)}" for key, value in learner["settings"].items()]
    return parse_policy(learner["name"], settings + args.set)


def check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError where options contradict each other."""
    if args.load_state is not None:
        options = {
            "--policy": args.policy,
            "--set": args.set,
            "--baseline": args.baseline,
            "--capacity": args.capacity,
            "--fitted": args.fitted,
            "--prefill": args.prefill,
        }
        wrong = [name for name, value in options.items() if value]
        if wrong or args.fetch != "auto":
            raise ConfigError(
                f"{(wrong or ['--fetch'])[0]} must be left out with --load-state: the saved state has its own"
            )
    if args.save_state is not None and args.baseline:
        raise ConfigError(f"--baseline must be left out with --save-state, got {args.baseline!r}")
    if args.max_new_tokens == 0 and args.save_state is None:
        raise ConfigError("--max-new-tokens must be at least 1 without --save-state, got 0")


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt under one policy.

    Attributes:
        prompt: a text, or a chat.
        policy: None: that of the saved state.
        sampler: how tokens are drawn.
        prefill: how the prompt's tokens attend to each other.
        fitted: arrays that the policy learned, or None.
        labelled: whether the policy's name stands before the answer.
    """

    prompt: Any
    policy: Any
    sampler: Any
    prefill: Any
    fitted: Any
    labelled: bool


def answer(args: argparse.Namespace, params: Any, question: Question) -> "Generation":
    """One generation, streamed; its state is loaded and saved where that was asked for."""
    from jshadow.engine.generation import GenerationLoop
    from jshadow.engine.options import GenerateOptions
    from jshadow.engine.saved_state import load_state, read_state_info, save_state

    policy, state, tokens_before = question.policy, None, []
    if args.load_state is not None:
        tokens_before = read_state_info(args.load_state)["tokens"]
        state = load_state(args.load_state, params)
        policy = state.policy
    progress = SlowProgress(f"prefill, {policy.name}")
    options = GenerateOptions(
        policy=policy,
        max_new_tokens=args.max_new_tokens,
        sampler=question.sampler,
        seed=args.seed,
        fetch=args.fetch,
        capacity=args.capacity,
        state=state,
        stop=args.stop or None,
        prefill=question.prefill,
        verify=args.verify,
        fitted=question.fitted,
        progress=progress,
        spare=SPARE if args.save_state is not None else 0,
        returns_state=args.save_state is not None,
    )
    run = GenerationLoop(params, question.prompt, options)
    write_answer(run, progress, f"[{policy.name}] " if question.labelled else "", silent=args.json)
    generation = run.results()[0]
    if args.save_state is not None:
        tokens = None
        if tokens_before is not None:
            tokens = [[*(tokens_before[0] if tokens_before else []), *run.prompts[0], *generation.tokens]]
        save_state(args.save_state, generation.state, params, tokens=tokens)
    return generation


def write_answer(run: Any, progress: SlowProgress, label: str, *, silent: bool) -> None:
    """Run a generation and stream its text, with a bar while the prompt is read and while the step is compiled."""
    pieces = iter(run)
    try:
        first = next(pieces, None)
    finally:
        progress.close()
    with waiting("compiling the decode step"):
        second = next(pieces, None)
    begun = [item for item in (first, second) if item is not None]
    for _, piece, _ in itertools.chain([(0, label, 0)], begun, pieces):
        if not silent:
            print(piece, end="", flush=True)
    if not silent:
        print(flush=True)


def to_json(generation: Any) -> dict[str, Any]:
    """A Generation as plain values."""
    return {"text": generation.text, "tokens": generation.tokens, "report": generation.report.to_json()}


def figures(results: Sequence[Any]) -> Table:
    """The table below an answer: one column a policy."""
    table = Table(title=None)
    table.add_column("")
    for generation in results:
        table.add_column(generation.report.policy.name, overflow="fold")

    def row(label: str, value: Callable[[Any], str]) -> None:
        table.add_row(label, *(value(generation) for generation in results))

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    row("answer", lambda m: (m.text or "").strip())
    row("prompt tokens", lambda m: f"{m.report.prompt_tokens:,}")
    row("tokens attended a step", lambda m: optional(m.report.attended_tokens, "{:,.1f}"))
    row("of these, in the last step", lambda m: parts_text(m.report.attended_parts))
    row("KV bytes on the device", lambda m: f"{m.report.device_bytes:,}")
    row("KV bytes on the host", lambda m: f"{m.report.host_bytes:,}")
    row("device bytes, full / this", lambda m: f"{m.report.full_bytes / m.report.device_bytes:.2f}")
    row("repeat share", lambda m: optional(m.report.hit_rate, "{:.1%}"))
    row("prefill", lambda m: m.report.prefill or "-")
    row("prefill seconds", lambda m: f"{m.report.prefill_seconds:.2f}")
    row("decode tokens/s", lambda m: optional(m.report.decode_tokens_per_second, "{:.1f}"))
    row("compile seconds", lambda m: f"{m.report.compile_seconds:.2f}")
    row("fetch", lambda m: m.report.fetch if m.report.host_bytes or m.report.fetch == "resident" else "-")
    row("fallback", lambda m: str(m.report.fallback))
    if any(generation.report.verified_steps is not None for generation in results):
        row("verified steps", lambda m: optional(m.report.verified_steps, "{:,}"))
    return table


def parts_text(parts: dict[str, float]) -> str:
    """ "256 selected, 384 outliers, ..." of the parts that are not empty."""
    return ", ".join(f"{tokens:,.4g} {name.replace('_', ' ')}" for name, tokens in parts.items() if tokens) or "-"
