"""`jshadow chat`: questions and answers about one document, which is read once."""

import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import SlowProgress, read_text, waiting
from jshadow.cli.fields import Command, option
from jshadow.cli.generate import why_larger, write_answer
from jshadow.cli.options import (
    MODEL_HELP,
    MethodOptions,
    SamplingOptions,
    WeightOptions,
    check_least,
    check_method,
    fitted_of,
    load_model,
    policy_of,
    sampler_of,
)
from jshadow.errors import CapacityError, ConfigError, PromptError

if TYPE_CHECKING:
    from jshadow.engine.generation import Generation

_QUIT = "/quit"
_ROOM = 4096  # tokens for questions and answers, unless --room says otherwise
GAUGE_CELLS = 20
# For a model without a chat template.
PLAIN_QUESTION, PLAIN_STOP = "Question: {}\nAnswer:", "\nQuestion:"


@dataclasses.dataclass(kw_only=True)
class Chat(MethodOptions, SamplingOptions, WeightOptions, CacheOptions, Command):
    """Ask about a document.

    The document is prefilled once, and each question and answer extends its KV state. A gauge below each answer shows
    the bytes of the state. Lines of standard input are the questions. /quit, the end of the input and Ctrl-C end the
    conversation.
    """

    model: str = option(MODEL_HELP, positional=True, required=True)
    file: str | None = option("a UTF-8 file with the document (default: no document)", metavar="FILE")
    max_new_tokens: int = option("of each answer, at most", 256)
    capacity: int | None = option("tokens to allocate for document, questions and answers together")
    room: int | None = option(f"tokens to allocate beside the document, if the context allows (default: {_ROOM:,})")
    json: bool = option("print one JSON object a turn instead of text", False)

    def run(self) -> int:
        """Return 0 when the user has ended the conversation."""
        from jshadow.engine.sparse_prefill import parse_prefill

        check_least(self, 1, "max_new_tokens")
        if self.capacity is not None and self.room is not None:
            raise ConfigError(f"--room must be left out with --capacity, got {self.room}")
        check_least(self, 1, "room")
        document = None if self.file is None else read_text(self.file, "--file")
        policy = policy_of(self)
        settings: dict[str, Any] = {"policy": policy, "sampler": sampler_of(self), "seed": self.seed}
        settings |= {"prefill": parse_prefill(self.prefill or "exact"), "fetch": self.fetch}
        check_method(self.fetch, self.fitted)
        params = load_model(self)
        if params.tokenizer is None:
            raise PromptError(f"chat needs a tokenizer, and {self.model} has none")
        settings["fitted"] = fitted_of(self, params, policy)
        settings |= {"capacity": self.capacity, "spare": self.room or _ROOM}
        talk = Conversation(params, settings, self.max_new_tokens, silent=self.json)
        try:
            if document is not None:
                talk.read(document)
            for question in questions():
                reply = talk.ask(question)
                print(json.dumps(talk.record(question, reply)) if self.json else talk.gauge(reply), flush=True)
                if talk.turns == 1 and not self.json and (sentence := why_larger(reply.report)):
                    print(sentence, flush=True)
        except KeyboardInterrupt:
            print(file=sys.stderr)
        return 0


def questions() -> Iterator[str]:
    """Yield the lines of standard input up to /quit or the end, without empty ones. A terminal shows a prompt sign.

    Raises:
        PromptError: the input is not UTF-8 text.
    """
    sign = ""
    if sys.stdin.isatty() and sys.stdout.isatty():
        sign = "> "
        with contextlib.suppress(ImportError):  # absent from some builds of Python
            importlib.import_module("readline")  # `input` then has a history
    while True:
        try:
            line = input(sign).removeprefix("\ufeff").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input must be UTF-8 text: {error}") from error
        if line == _QUIT:
            return
        if line:
            yield line


class Conversation:
    """The turns of a chat on one KV state.

    Attributes:
        state: the state after the last answer; None before anything is prefilled.
        turns: number of questions that were answered.
    """

    def __init__(self, params: Any, settings: dict[str, Any], max_new_tokens: int, *, silent: bool) -> None:
        """Begin without a state. The settings are keyword arguments of `GenerateOptions` for the first prefill."""
        self.params, self.settings, self.most, self.silent = params, settings, max_new_tokens, silent
        self.state: Any = None
        self.document = False
        self.turns = 0
        self.template = bool(getattr(params.tokenizer, "chat_template", None))

    def read(self, document: str) -> None:
        """Prefill a document, as the beginning of the first question."""
        from jshadow.weights.templates import document_ids

        self.state, self.document = self._run(document_ids(self.params.tokenizer, document), 0).state, True

    def ask(self, question: str) -> "Generation":
        """Answer a question, and keep the state for the next one.

        Raises:
            CapacityError: there is no room for the question and one token of an answer.
        """
        tokens, most = self._encode(question), self.most
        if self.state is not None:
            import numpy as np

            room = int(np.asarray(self.state.room()).min())
            most = min(most, room - len(tokens))
            if most < 1:
                raise CapacityError(
                    f"the conversation has room for {room} more of {self.state.capacity} tokens, got a question of "
                    f"{len(tokens)}: start it anew with a larger --room or --capacity"
                )
        generation = self._run(tokens, most)
        with waiting("compiling the step that keeps the answer"):
            self.state = generation.state
        self.turns += 1
        return generation

    def _encode(self, question: str) -> list[int]:
        """Return the token ids of a question that continues the state."""
        from jshadow.engine.text import encode as encode_prompt
        from jshadow.weights.templates import frame
        from jshadow.weights.tokenizer import encode_plain, opening

        tokenizer, vocab = self.params.tokenizer, self.params.config.vocab_size
        if not self.template:
            text = PLAIN_QUESTION.format(question)
            if self.state is None:
                return opening(tokenizer) + encode_plain(tokenizer, text, begins=True)
            return encode_plain(tokenizer, f"\n\n{text}")
        if self.document and not self.turns:
            return frame(tokenizer, question)[1]
        import numpy as np

        last = None if self.state is None else int(np.asarray(self.state.last)[0])
        return encode_prompt(tokenizer, [{"role": "user", "content": question}], vocab, after=last)

    def _run(self, tokens: list[int], most: int) -> "Generation":
        """Feed tokens, and generate up to `most` new ones, which are printed as they come."""
        from jshadow.engine.generation import GenerationLoop
        from jshadow.engine.options import GenerateOptions

        settings = {"sampler": self.settings["sampler"], "seed": self.settings["seed"], "state": self.state}
        stop = None if self.template else PLAIN_STOP
        with SlowProgress("prefill") as progress:
            if self.state is None:
                settings = self.settings | {"progress": progress.prefill}
            loop = GenerationLoop(self.params, tokens, GenerateOptions(max_new_tokens=most, stop=stop, **settings))
            self.state = None  # the loop consumes it
            write_answer(loop, progress, "", silent=self.silent or not most)
        return loop.results()[0]

    def tokens_held(self) -> int:
        """Return the number of tokens that the state holds."""
        import numpy as np

        return int(np.asarray(self.state.lengths)[0])

    def gauge(self, generation: "Generation") -> str:
        """Return one line with the bytes of the state beside those of full attention, and the number of tokens."""
        report = generation.report
        share = report.device_bytes / report.full_bytes
        filled = min(GAUGE_CELLS, round(share * GAUGE_CELLS))
        bar = "█" * filled + "░" * (GAUGE_CELLS - filled)
        return (
            f"[{bar}] device {report.device_bytes / 1e6:,.1f} MB ({share:.0%} of full attention's "
            f"{report.full_bytes / 1e6:,.1f} MB), host {report.host_bytes / 1e6:,.1f} MB, "
            f"{self.tokens_held():,} of {self.state.capacity:,} tokens"
        )

    def record(self, question: str, generation: "Generation") -> dict[str, Any]:
        """Return one turn as plain values for JSON."""
        report = generation.report
        return {
            "turn": self.turns,
            "question": question,
            "text": generation.text,
            "tokens": generation.tokens,
            "device_bytes": report.device_bytes,
            "host_bytes": report.host_bytes,
            "full_bytes": report.full_bytes,
            "tokens_held": self.tokens_held(),
            "capacity": self.state.capacity,
            "report": report.to_json(),
        }
