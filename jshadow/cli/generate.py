"""`jshadow generate`: its options, and how an answer is streamed."""

import argparse
import dataclasses
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.console import console
from jshadow.cli.files import check_writable, read_text
from jshadow.cli.mesh import add_mesh_options
from jshadow.cli.options import (
    JSON_HELP,
    add_policy_options,
    add_sampling_options,
    add_weights_options,
    check_fetch,
    check_fitted_file,
    load_model,
    policy_of,
    sampler_of,
)
from jshadow.cli.processes import add_process_options, check_same, joined
from jshadow.cli.progress import SlowProgress, waiting
from jshadow.cli.report_table import figures, is_right, notes
from jshadow.errors import ConfigError, PromptError
from jshadow.weights.texts import mended

if TYPE_CHECKING:
    from jshadow.engine.generation import Generation

SPECULATE_HELP = (
    "propose tokens, and check several of them at once; no token changes. prompt_lookup: what followed the newest "
    "tokens before (:tokens=8:ngram=3). self: steps of the model over a part of its cache, with --policy full "
    "(:tokens=8:budget=512). A directory: a smaller model of the same tokenizer"
)
SPARE = 1024  # tokens that can still be added to a saved state, unless --capacity says otherwise


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_generate)
    add.add_argument("model", help="HF directory, or hub id")
    add.add_argument("source", nargs="?", choices=["-"], help="read the prompt from standard input")
    add.add_argument("--prompt", help="the prompt")
    add.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the prompt")
    add.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    add.add_argument(
        "--plain-prompt", action="store_true", help="special tokens in the prompt, such as <|im_end|>, are plain text"
    )
    add_policy_options(add)
    add.add_argument("--baseline", metavar="POLICY", help="run this policy first and show both side by side")
    add.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s; 0 only saves the state")
    add_sampling_options(add)
    add.add_argument("--speculate", metavar="NAME[:KEY=VALUE...]", help=SPECULATE_HELP)
    add.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text (repeatable)")
    add.add_argument("--capacity", type=int, help="tokens to allocate (default: what is needed, rounded up)")
    add.add_argument(
        "--save-state", metavar="FILE", help=f"save the KV state afterwards, with room for {SPARE:,} tokens"
    )
    add.add_argument(
        "--load-state",
        metavar="FILE",
        help="continue a saved state: the prompt is its next turn. --policy module:Class names the class of a policy "
        "that is not part of jshadow",
    )
    add.add_argument("--expect", metavar="TEXT", help="mark each answer as right if it has this text in it")
    add.add_argument("--verify", action="store_true", help="check each step against the resident path (slow)")
    add_weights_options(add)
    add_cache_option(add)
    add_mesh_options(add)
    add_process_options(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def read_prompt(args: argparse.Namespace) -> str:
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
        text = mended(sys.stdin.read().removeprefix("\ufeff") if args.source else args.prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"prompt must be readable UTF-8 text: {error}") from error
    if not text.strip():
        raise PromptError(f"prompt must have text in it, got {text!r:.20}")
    return text


def run_generate(args: argparse.Namespace) -> int:
    """Run `jshadow generate`, and return 0 when the answer is complete."""
    from jshadow.engine.sparse_prefill import parse_prefill
    from jshadow.engine.speculation import parse_drafter
    from jshadow.policies import parse_policy

    text = read_prompt(args)
    check_options(args)
    check_files(args)
    policies: list[Any] = [policy_of(args)] if args.load_state is None else [None]
    if args.baseline:
        policies.insert(0, parse_policy(args.baseline, []))
    prefill, sampler = parse_prefill(args.prefill or "exact"), sampler_of(args)
    drafter = None if args.speculate is None else parse_drafter(args.speculate, args.dtype)
    prompt: Any = [{"role": "user", "content": text}] if args.chat else text
    several = len(policies) > 1
    questions = [Question(prompt, policy, sampler, prefill, drafter, None, labeled=several) for policy in policies]
    with joined(args):
        params = load_model(args)
        check_same(args, params, {"prompt": text.encode(), "fitted": args.fitted})
        return answer_all(args, params, questions)


def answer_all(args: argparse.Namespace, params: Any, questions: "list[Question]") -> int:
    """Answer the questions and print the report. The last one gets the arrays of --fitted. Return 0."""
    from jshadow.engine.saved.fitted import load_fitted

    if args.fitted is not None:
        fitted = load_fitted(args.fitted, params, questions[-1].policy)
        questions[-1] = dataclasses.replace(questions[-1], fitted=fitted)
    results = [answer(args, params, question) for question in questions]
    if args.json:
        print(json.dumps({"results": [to_json(one, args.expect) for one in results]}))
        return 0
    out = console(100)
    out.print(figures(results, args.expect))
    for sentence in notes(results):
        out.print(sentence, highlight=False)
    return 0


def check_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for an unknown fetch mode, and for options that contradict each other."""
    check_fetch(args.fetch)
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


def check_files(args: argparse.Namespace) -> None:
    """Check the files of the options before the weights are loaded.

    The class of --policy module:Class is registered, so that a saved state of such a policy can be loaded.

    Raises:
        CheckpointError: a file cannot be read or written.
        ConfigError: there is no such class.
    """
    from jshadow.engine.saved.state import read_state_info
    from jshadow.policies import find_policy

    if args.load_state is not None:
        if args.policy is not None:
            find_policy(args.policy)
        read_state_info(args.load_state)
    if args.save_state is not None:
        check_writable(args.save_state, "--save-state")
    check_fitted_file(args.fitted)


@dataclasses.dataclass(frozen=True)
class Question:
    """One prompt under one policy.

    Attributes:
        prompt: a text, or a chat.
        policy: the policy. None: the policy of the saved state.
        sampler: how tokens are drawn.
        prefill: the attention between the tokens of the prompt.
        drafter: what proposes tokens, or None.
        fitted: arrays that the policy has learned, or None.
        labeled: whether the policy's name is printed before the answer.
    """

    prompt: Any
    policy: Any
    sampler: Any
    prefill: Any
    drafter: Any
    fitted: Any
    labeled: bool


def answer(args: argparse.Namespace, params: Any, question: Question) -> "Generation":
    """Generate one answer and print it as it comes. If the options say so, load a state before and save one after."""
    from jshadow.engine.generation import GenerationLoop
    from jshadow.engine.options import GenerateOptions
    from jshadow.engine.saved.state import load_state, read_state_info, save_state

    policy, state, tokens_before = question.policy, None, []
    if args.load_state is not None:
        tokens_before = read_state_info(args.load_state)["tokens"]
        state = load_state(args.load_state, params)
        policy = state.policy
    with SlowProgress(f"prefill, {policy.name}") as progress:
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
            speculate=question.drafter,
            plain=args.plain_prompt,
            progress=progress.prefill,
            before=tokens_before or None,
            spare=SPARE if args.save_state is not None else 0,
            returns_state=args.save_state is not None,
        )
        run = GenerationLoop(params, question.prompt, options)
        write_answer(run, progress, f"[{policy.name}] " if question.labeled else "", silent=args.json)
    generation = run.results()[0]
    if args.save_state is not None:
        tokens = None
        if tokens_before is not None:
            tokens = [[*(tokens_before[0] if tokens_before else []), *run.prompts[0], *generation.tokens]]
        save_state(args.save_state, generation.state, params, tokens=tokens)
    return generation


def write_answer(run: Any, progress: SlowProgress, label: str, *, silent: bool) -> None:
    """Run a generation and print its text as it comes.

    Progress is on stderr, which may be the same terminal or pipe. So there is none between the pieces of a text, and
    the last line of the text is ended before the message of an error comes.

    Args:
        run: the GenerationLoop.
        progress: the progress of the prefill. It is closed.
        label: printed before the text.
        silent: whether no text is printed.
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
    return values if expected is None else values | {"right": is_right(generation, expected)}
