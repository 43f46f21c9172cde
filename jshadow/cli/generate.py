"""`jshadow generate`: an answer that is streamed, and the table of its figures."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import SlowProgress, check_writable, read_text, show_sentences, show_table, waiting
from jshadow.cli.fields import Command, option
from jshadow.cli.options import (
    MODEL_HELP,
    MethodOptions,
    SamplingOptions,
    WeightOptions,
    check_method,
    fitted_of,
    load_model,
    policy_of,
    sampler_of,
)
from jshadow.cli.processes import MeshOptions, ProcessOptions, check_same, joined
from jshadow.errors import ConfigError, PromptError
from jshadow.weights.tokenizer import mended

if TYPE_CHECKING:
    from jshadow.engine.generation import Generation
    from jshadow.engine.report import Report

_SPARE = 1024  # tokens that can still be added to a saved state, unless --capacity says otherwise


@dataclasses.dataclass(kw_only=True)
class Generate(MethodOptions, SamplingOptions, WeightOptions, MeshOptions, ProcessOptions, CacheOptions, Command):
    """Answer a prompt, streaming the text."""

    model: str = option(MODEL_HELP, positional=True, required=True)
    source: Literal["-"] | None = option("read the prompt from standard input", positional=True)
    prompt: str | None = option("the prompt")
    prompt_file: str | None = option("a UTF-8 file with the prompt", metavar="FILE")
    chat: bool = option("put the prompt through the model's chat template", False)
    plain_prompt: bool = option("special tokens in the prompt, such as <|im_end|>, are plain text", False)
    baseline: str | None = option("run this policy first and show both side by side", metavar="POLICY")
    max_new_tokens: int = option("default: %(default)s; 0 only saves the state", 128)
    speculate: str | None = option(
        "propose tokens, and check several of them at once; no token changes. prompt_lookup: what followed the newest "
        "tokens before (:tokens=8:ngram=3). self: steps of the model over a part of its cache, with --policy full "
        "(:tokens=8:budget=512). A directory: a smaller model of the same tokenizer",
        metavar="NAME[:KEY=VALUE...]",
    )
    stop: Sequence[str] = option("end at this text (repeatable)", (), metavar="TEXT")
    capacity: int | None = option("tokens to allocate (default: what is needed, rounded up)")
    save_state: str | None = option(f"save the KV state afterwards, with room for {_SPARE:,} tokens", metavar="FILE")
    load_state: str | None = option(
        "continue a saved state: the prompt is its next turn. --policy module:Class names the class of a policy that "
        "is not part of jshadow",
        metavar="FILE",
    )
    expect: str | None = option("mark each answer as right if it has this text in it", metavar="TEXT")
    verify: bool = option("check each step against the resident path (slow)", False)

    def run(self) -> int:
        """Return 0 when the answer is complete."""
        from jshadow.engine.sparse_prefill import parse_prefill
        from jshadow.engine.speculation import parse_drafter
        from jshadow.policies import parse_policy

        text = read_prompt(self)
        _check(self)
        policies: list[Any] = [policy_of(self) if self.load_state is None else None]
        if self.baseline:
            policies.insert(0, parse_policy(self.baseline, []))
        options: dict[str, Any] = {"sampler": sampler_of(self), "prefill": parse_prefill(self.prefill or "exact")}
        options["speculate"] = None if self.speculate is None else parse_drafter(self.speculate, self.dtype)
        prompt: Any = [{"role": "user", "content": text}] if self.chat else text
        with joined(self):
            params = load_model(self)
            check_same(self, params, {"prompt": text.encode(), "fitted": self.fitted})
            fitted = fitted_of(self, params, policies[-1])
            results = []
            for policy in policies:
                own = options | {"policy": policy, "fitted": fitted if policy is policies[-1] else None}
                results.append(_answer(self, params, prompt, own, f"[{policy.name}] " if self.baseline else ""))
            if self.json:
                print(json.dumps({"results": [to_json(one, self.expect) for one in results]}))
            else:
                show_figures(results, self.expect)
        return 0


def read_prompt(args: Generate) -> str:
    """Return the prompt from --prompt, --prompt-file or standard input.

    Raises:
        PromptError: there is not exactly one of them, or it cannot be read.
    """
    sources = [args.prompt is not None, args.prompt_file is not None, args.source is not None]
    if sum(sources) != 1:
        raise PromptError("prompt must come from exactly one of --prompt, --prompt-file and '-' (standard input)")
    if args.prompt_file is not None:
        return read_text(args.prompt_file, "prompt")
    try:
        text = mended(sys.stdin.read().removeprefix("\ufeff") if args.prompt is None else args.prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt must be readable UTF-8 text: {error}") from error
    if not text.strip():
        raise PromptError(f"prompt must have text in it, got {text!r:.20}")
    return text


def _check(args: Generate) -> None:
    """Check the options and their files before the weights are loaded."""
    from jshadow.engine.saved.state import read_state_info
    from jshadow.policies import find_policy

    check_method(args.fetch, args.fitted)
    if args.load_state is not None:
        options = {
            "--policy": args.policy is not None and ":" not in args.policy,
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
    if args.load_state is not None:
        if args.policy is not None:
            find_policy(args.policy)
        read_state_info(args.load_state)
    if args.save_state is not None:
        check_writable(args.save_state, "--save-state")


def _answer(args: Generate, params: Any, prompt: Any, own: dict[str, Any], label: str) -> "Generation":
    """Generate one answer and print it as it comes. If the options say so, load a state before and save one after."""
    from jshadow.engine.generation import GenerationLoop
    from jshadow.engine.options import GenerateOptions
    from jshadow.engine.saved.state import load_state, read_state_info, save_state

    before = []
    if args.load_state is not None:
        before = read_state_info(args.load_state)["tokens"]
        state = load_state(args.load_state, params)
        own |= {"state": state, "policy": state.policy}
    with SlowProgress(f"prefill, {own['policy'].name}") as progress:
        options = GenerateOptions(
            **own,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            fetch=args.fetch,
            capacity=args.capacity,
            stop=args.stop or None,
            verify=args.verify,
            plain=args.plain_prompt,
            progress=progress.prefill,
            before=before or None,
            spare=_SPARE if args.save_state is not None else 0,
            returns_state=args.save_state is not None,
        )
        run = GenerationLoop(params, prompt, options)
        write_answer(run, progress, label, silent=args.json)
    generation = run.results()[0]
    if args.save_state is not None:
        tokens = None
        if before is not None:
            tokens = [[*(before[0] if before else []), *run.prompts[0], *generation.tokens]]
        save_state(args.save_state, generation.state, params, tokens=tokens)
    return generation


def write_answer(run: Any, progress: SlowProgress, label: str, *, silent: bool) -> None:
    """Run a generation and print its text as it comes.

    Progress is on stderr, which may be the same terminal or pipe. So there is none between the pieces of a text, and
    the last line of the text is ended before the message of an error comes. The progress is that of the prefill, and
    is closed. The label comes before the text, of which nothing is printed if `silent`.
    """
    pieces = iter(run)
    try:
        first = next(pieces, None)
    finally:
        progress.close()
    with waiting("compiling the decode step"):
        second = next(pieces, None)
    pieces = itertools.chain([item for item in (first, second) if item is not None], pieces)
    if silent:
        with SlowProgress("decode", first="") as steps:
            for count, _ in enumerate(pieces, 1):
                steps(count, run.options.max_new_tokens)
        return
    try:
        for _, piece, _ in itertools.chain([(0, label, 0)], pieces):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)


def to_json(generation: Any, expected: str | None) -> dict[str, Any]:
    """Return a Generation as plain values: its text, tokens and report, and "right" if a text is expected."""
    values = {"text": generation.text, "tokens": generation.tokens, "report": generation.report.to_json()}
    return values if expected is None else values | {"right": _is_right(generation, expected)}


def _is_right(generation: "Generation", expected: str) -> bool:
    return expected in (generation.text or "")


def show_figures(results: Sequence["Generation"], expected: str | None = None) -> None:
    """Print the figures of one or more generations, with one column for each policy, and sentences about them.

    If there is a text that a right answer has in it, a row has ticks and crosses.
    """
    rows: list[Sequence[str]] = []

    def row(label: str, value: Callable[[Any], str]) -> None:
        rows.append([label, *(value(generation) for generation in results)])

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    row("answer", lambda m: (m.text or "").strip())
    if expected is not None:
        row(f"right ({expected})", lambda m: "✓" if _is_right(m, expected) else "✗")
    for label, name in (("device", "device_kind"), ("dtype", "dtype")):
        if any(hasattr(generation.report, name) for generation in results):
            row(label, lambda m, name=name: str(getattr(m.report, name, "-")))  # type: ignore[misc]
    row("prompt tokens", lambda m: f"{m.report.prompt_tokens:,}")
    row("tokens attended a step", lambda m: optional(m.report.attended_tokens, "{:,.1f}"))
    row("of these, in the last step", lambda m: _parts_text(m.report.attended_parts))
    row("KV bytes on the device", lambda m: f"{m.report.device_bytes:,}")
    row("KV bytes on the host", lambda m: f"{m.report.host_bytes:,}")
    row("device bytes, full / this", lambda m: f"{m.report.full_bytes / m.report.device_bytes:.2f}")
    row("repeat share", lambda m: optional(m.report.hit_rate, "{:.1%}"))
    row("prefill", lambda m: m.report.prefill or "-")
    row("prefill seconds", lambda m: f"{m.report.prefill_seconds:.2f}")
    row("decode tokens/s", lambda m: optional(m.report.decode_tokens_per_second, "{:.1f}"))
    if any(generation.report.cycles is not None for generation in results):
        row("speculation", lambda m: _speculation_text(m.report))
    row("compile seconds", lambda m: f"{m.report.compile_seconds:.2f}")
    row("fetch", lambda m: m.report.fetch if m.report.host_bytes or m.report.fetch == "resident" else "-")
    row("fallback", lambda m: str(m.report.fallback))
    if any(generation.report.verified_steps is not None for generation in results):
        row("verified steps", lambda m: optional(m.report.verified_steps, "{:,}"))
    show_table(["", *(one.report.policy.name for one in results)], rows, width=100, wrap=True)
    show_sentences(notes(results), 100)


def _parts_text(parts: dict[str, float]) -> str:
    """Return a text such as "256 selected, 384 outliers" of the parts that are not empty."""
    return ", ".join(f"{tokens:,.4g} {name.replace('_', ' ')}" for name, tokens in parts.items() if tokens) or "-"


def _speculation_text(report: "Report") -> str:
    """Return a text such as "2.4 tokens a cycle, 57 of 80 proposed tokens kept", or "-" without speculation."""
    if not report.cycles:
        return "-"
    tokens = (report.cycles + (report.accepted_tokens or 0)) / report.cycles
    return f"{tokens:.2f} tokens a cycle, {report.accepted_tokens:,} of {report.proposed_tokens:,} proposed kept"


def notes(results: Sequence["Generation"]) -> list[str]:
    """Return the sentences below the table.

    They say why a policy takes more memory than full attention, what offloading costs on a CPU, and why a fetch mode
    was chosen on an accelerator.
    """
    import jax

    sentences = [sentence for one in results if (sentence := why_larger(one.report))]
    if jax.default_backend() == "cpu" and any(one.report.host_bytes for one in results):
        sentences.append(
            "On a CPU, offloading costs time and saves nothing: host memory and device memory are the same memory."
        )
    if jax.default_backend() != "cpu":
        sentences += [f"fetch {one.report.fetch_reason}." for one in results if one.report.fetch_reason]
    return sentences


def why_larger(report: "Report") -> str | None:
    """Return a sentence for a policy that takes more device memory than full attention, or None if it takes less."""
    if report.device_bytes <= report.full_bytes:
        return None
    tokens = report.prompt_tokens + report.generated_tokens
    sentence = (
        f"{report.policy.name} takes more device memory than full attention because what it adds to keys and values "
        f"outweighs what it leaves out of {tokens:,} tokens"
    )
    return sentence + (", and fetch=resident moves nothing to the host." if report.fetch == "resident" else ".")
