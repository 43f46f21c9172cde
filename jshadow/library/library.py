"""Library: texts that a model has read once. They can be asked at any time, also after a restart."""

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine.checks import check_capacity, check_ids
from jshadow.engine.decode import extend
from jshadow.engine.generation import Generation, GenerationLoop
from jshadow.engine.options import GenerateOptions, workload_of
from jshadow.engine.prefill.whole import prefill_many
from jshadow.engine.sampling import Sampler
from jshadow.engine.text import encode as encode_prompt
from jshadow.engine.types import OnePrompt, Progress
from jshadow.errors import CheckpointError, NumericalError, PromptError, StateMismatch
from jshadow.library.pdf import Begun, read_pdf
from jshadow.library.shelf import ANSWER, DOCUMENT, Entry, Stored
from jshadow.library.state_store import StateStore
from jshadow.ops.buckets import round_up
from jshadow.ops.parts import deal, parse_part
from jshadow.weights.convert.files import readable
from jshadow.weights.digest import host_array
from jshadow.weights.params import Params
from jshadow.weights.templates import changed_turn, document_ids, follow_up, frame, has_template
from jshadow.weights.tokenizer import mended, read_text

TEXTS, PDF = (".txt", ".md"), ".pdf"
_Source = str | os.PathLike[str] | list[int] | tuple[int, ...] | np.ndarray


def paths_of_part(paths: Sequence[Path], part: str | None) -> list[Path]:
    """Return the documents that one of several processes reads, such as "2/3" of all, in the given order.

    Each file is in exactly one part if all processes get the same list. The files are sorted by name, and then dealt by
    their bytes (see `deal`). So neither their order matters, nor the folder in which a machine has them. With more
    parts than files, some parts are empty. Raises ConfigError unless `part` is None or I/N with I from 1 to N, and
    CheckpointError if a file is missing.
    """
    if part is None:
        return [*paths]
    ordered, sizes = sorted(set(paths), key=lambda path: (path.name, str(path))), []
    for path in ordered:
        with readable(path):
            sizes.append(path.stat().st_size)
    chosen = {ordered[place] for place in deal(sizes, parse_part(part))}
    return [path for path in paths if path in chosen]


def ids_of(source: _Source, params: Params) -> tuple[np.ndarray, str]:
    """Return the token ids of a source, int32 [n], and a title.

    Args:
        source: token ids, a text, or the path of a .txt, .md or .pdf file. A text is placed where a document comes in
            the first message of a chat, if the tokenizer has a chat template.

    Raises:
        PromptError: there are no tokens, an id is out of range, a text has no tokenizer, or a text is the name of a
            file.
        CheckpointError: a file is missing, of another kind, not UTF-8 text, or an encrypted, damaged or empty PDF.
        ConfigError: the package for PDF files is not installed.
    """
    if isinstance(source, str | os.PathLike):
        if params.tokenizer is None:
            raise PromptError(f"source must be token ids, because the checkpoint has no tokenizer; got {source!r:.80}")
        if isinstance(source, str):
            text, title = source, ""
        else:
            text, title = read_document(Path(source)), mended(Path(source).name)
        if "\n" not in text and text.lower().endswith((*TEXTS, PDF)):
            raise PromptError(f"source must be a pathlib.Path to be read as a file, got the text {text!r:.80}")
        return text_ids(text, params), title
    if not len(source):
        raise PromptError("source must have at least 1 token, got none")
    return check_ids(params.config, np.asarray(source), (None,), "source"), ""


def text_ids(text: str, params: Params) -> np.ndarray:
    """Return the token ids of a text as a document, int32 [n]. Texts of special tokens in it are plain text.

    Raises PromptError if there is no text in it, or if the chat template allows no document.
    """
    if not text.strip():
        raise PromptError(f"source must have text in it, got {text!r:.20}")
    return check_ids(params.config, document_ids(params.tokenizer, text), (None,), "source")


def read_document(path: Path, begun: Begun | None = None) -> str:
    """Return the text of a file. Raises CheckpointError or ConfigError as `ids_of` does. `begun`: as in `read_pdf`."""
    path = path.expanduser()
    kind = path.suffix.lower()
    if kind not in (*TEXTS, PDF):
        raise CheckpointError(f"{path} must be a .txt, .md or .pdf file, got {path.suffix or 'no ending'!r}")
    try:
        text = read_pdf(path, begun=begun) if kind == PDF else read_text(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except UnicodeError as error:
        raise CheckpointError(f"{path} must be UTF-8 text, got other bytes: {error}") from error
    if not text.strip():
        raise CheckpointError(f"{path} must have text in it, got none")
    return text


_ROOM_STEP = 64  # rooms are rounded up to a multiple of this, so that similar questions share compiled programs
_PLAIN_STOP = "\nQuestion:"  # for a model without a chat template


class Asking:
    """One question about a stored text. Iterate over `loop`, the generation, and then call `Library.finish`."""

    def __init__(
        self, library: "Library", key: str, question: OnePrompt, options: Mapping[str, Any], *, store: bool
    ) -> None:
        """Load the text, and begin a generation. The arguments and errors are those of `Library.ask`.

        `options` are `max_new_tokens` and other options of `GenerateOptions`, without the state.
        """
        state = library.load(key)
        entry = library.catalog.entry(key)
        note, self.before, self.store = entry.note, entry.ids, store
        self.title, ends = note.get("title", ""), note.get("ends", "")
        self.stored = len(self.before)
        changed = _changed(library.params, entry, question)
        if changed is None:
            self.ids = question_ids(library.params, question, ends, int(self.before[-1]))
        else:
            state, self.stored = library.begun(changed)
            held = self.stored or len(changed) - 1
            self.before, self.ids = changed[:held], changed[held:].tolist()
        tokenizer, fields = library.params.tokenizer, dict(options)
        if isinstance(question, str) and ends and fields.get("stop") is None and not has_template(tokenizer):
            fields["stop"] = _PLAIN_STOP
        needed = len(self.ids) + options["max_new_tokens"]
        room = min(round_up(needed, _ROOM_STEP), library.capacity - len(self.before))
        fields |= {"state": state.with_room(max(needed, room)), "returns_state": store, "before": [self.before]}
        self.loop = GenerationLoop(library.params, self.ids, GenerateOptions(**fields))


def _changed(params: Params, entry: Entry, question: OnePrompt) -> np.ndarray | None:
    """Return the token ids of a stored chat with the next question, int32 [n], if its template changes the last answer.

    None: it does not, or the stored text is not a chat that ends with an answer.
    """
    is_chat = entry.note.get("ends") == ANSWER and has_template(params.tokenizer)
    if not (is_chat and isinstance(question, str) and question.strip()):
        return None
    held = entry.ids.tolist()
    ids = changed_turn(params.tokenizer, held[:-1] if held[-1] in params.config.eos_ids else held, question)
    return None if ids is None else np.asarray(ids, np.int32)


def question_ids(params: Params, question: OnePrompt, ends: str, last: int) -> list[int]:
    """Return the token ids of a question. The text before it `ends` with "document", "answer" or "", and a token.

    Raises PromptError if the question is empty, or if it is text and there is no tokenizer.
    """
    tokenizer = params.tokenizer
    if isinstance(question, str) and question.strip() and tokenizer is not None:
        if ends == DOCUMENT:
            return frame(tokenizer, question)[1]
        if ends == ANSWER and not has_template(tokenizer):
            return follow_up(tokenizer, question)
        if ends == ANSWER:
            question = [{"role": "user", "content": question}]
    return encode_prompt(tokenizer, question, params.config.vocab_size, after=last)


_LEAST_SHARE = 2  # a stored beginning is extended if it has at least 1 / LEAST_SHARE of the tokens


@dataclasses.dataclass(frozen=True)
class Reply(Generation):
    """The answer of `Library.ask`.

    Attributes:
        key: that of the state at the end of the answer, or None if it was not stored.
        stored_tokens: number of tokens before the answer that were stored.
        read_tokens: number of tokens that were read: those of the question, and those before it that the chat template
            has changed.
    """

    key: str | None = None
    stored_tokens: int = 0
    read_tokens: int = 0


class Library(StateStore):
    """States of texts that a model has read once.

    A state is found by a SHA-256 of the model, the policy, the dtype, the capacity, the fetch mode and the token ids.
    It lies in the fastest tier that has room: device memory, pinned host memory, disk, an object store. A state that is
    stored durably also has a file, and is there again after a restart.

    All methods can be called from any thread. No lock is held while a model runs, or while a file is read, hashed or
    written. Two threads that add the same document read it once.
    """

    def add(self, source: _Source, *, title: str | None = None, progress: Progress | None = None) -> Stored:
        """Read a document and store its state durably. A document that is stored already is not read again.

        If a stored state holds at least half of the tokens as its beginning, it is extended by the others. States that
        other machines put into the object store are noticed first.

        Args:
            source: token ids, a text, or a `pathlib.Path` of a .txt, .md or .pdf file.
            title: a title for `documents`. None: the name of the file.
            progress: called with a `PrefillProgress` after each unit of the work.

        Raises:
            PromptError: the source is empty, or its tokens are not the model's.
            CheckpointError: a file cannot be read, or the state cannot be written.
            CapacityError: the document exceeds the capacity, or its state fits no tier.
            NumericalError: the model's logits are NaN.
            ConfigError: a package for such a source is not installed.
        """
        ids, name = ids_of(source, self.params)
        check_capacity(self.params.config, self.capacity, len(ids))
        made = self._begin_making(self.identity.key(ids))
        try:
            found = self.longest(ids, look=True)
            if found is not None and found.tokens == len(ids):
                return found
            state = self._extended(found, ids, progress) if found is not None else None
            if state is None:
                state = self._read_whole(ids, progress)
            key = self.store(ids, state, title=name if title is None else title, ends=DOCUMENT)
            return self.catalog.entry(key).stored(key, self.tiers.tier_of(key))
        finally:
            made()

    def ask(
        self,
        key: str,
        question: OnePrompt,
        *,
        max_new_tokens: int = 128,
        sampler: Sampler | None = None,
        seed: int = 0,
        stop: str | int | Sequence[str | int] | None = None,
        store: bool = False,
    ) -> Reply:
        """Answer a question about a stored text.

        If the chat template writes an earlier answer otherwise before the next question, as Qwen3's leaves out what the
        model thought, the chat is read anew from the longest stored beginning that stays. The reply tells how much.

        Args:
            key: the text, as `add` or `store` returned it.
            question: text, token ids, or a chat. A text after a document is placed where a question comes in the first
                message of a chat. A text after an answer is the next turn.
            max_new_tokens, sampler, seed, stop: as in `generate`.
            store: whether the state at the end of the answer is stored. `key` of the reply then names it.

        Raises:
            CapacityError: the text, the question and the answer exceed the capacity.

        The other errors are those of `load`, `generate` and `store`.
        """
        options = {"max_new_tokens": max_new_tokens, "sampler": sampler, "seed": seed, "stop": stop}
        asking = Asking(self, key, question, options, store=store)
        for _ in asking.loop:
            pass
        return self.finish(asking)

    def prompt(self, key: str, question: OnePrompt) -> list[int]:
        """Return the token ids of a stored text and of a question about it, as `ask` puts them together.

        A serving engine with this library finds the stored text at the beginning of these ids. Raises CheckpointError
        if there is no such text, and PromptError as `ask` does.
        """
        entry = self.catalog.entry(key)
        changed = _changed(self.params, entry, question)
        if changed is not None:
            return changed.tolist()
        asked = question_ids(self.params, question, entry.note.get("ends", ""), int(entry.ids[-1]))
        return [*entry.ids.tolist(), *asked]

    def finish(self, asking: Asking) -> Reply:
        """Return the answer of an `Asking` whose loop has ended, and store its state if that was asked for."""
        [generation] = asking.loop.results()
        key = None
        if asking.store:
            ids = [*asking.before.tolist(), *asking.ids, *generation.tokens]
            key = self.store(ids, generation.state, title=asking.title, ends=ANSWER)
        read = len(asking.before) + len(asking.ids) - asking.stored
        return Reply(**vars(generation), key=key, stored_tokens=asking.stored, read_tokens=read)

    def begun(self, ids: np.ndarray) -> tuple[KVState, int]:
        """Return a state that holds a beginning of `ids`, int32 [n], and how many of its tokens were stored.

        It is the longest stored beginning without the last token. If there is none, these tokens are read.
        """
        found = self.longest(ids[:-1])
        return (self._read_whole(ids[:-1], None), 0) if found is None else (self.load(found.key), found.tokens)

    def _begin_making(self, key: str) -> Callable[[], None]:
        """Wait until no other thread makes or writes a state. Return the function that ends making it."""
        while True:
            self.catalog.wait(key)
            with self.work:
                other = self.making.get(key)
                if other is None:
                    mine = self.making[key] = threading.Event()
                    break
            other.wait()

        def end() -> None:
            del self.making[key]
            mine.set()

        return end

    def _read_whole(self, ids: np.ndarray, progress: Progress | None) -> KVState:
        """Read all `ids`, int32 [n]."""
        width = workload_of([len(ids)], self.capacity, str(self.params.dtype)).prompt_width
        tokens = np.pad(ids, (0, width - len(ids)))[None]
        [(logits, state)] = prefill_many(
            self.params,
            tokens,
            [len(ids)],
            [self.policy],
            capacity=self.capacity,
            fetch=self.fetch,
            fitted=self.fitted,
            progress=progress,
            room=0,
        )
        _check_numbers(logits)
        return state

    def _extended(self, found: Stored, ids: np.ndarray, progress: Progress | None) -> KVState | None:
        """Extend a stored beginning to all `ids`. Return None if it is too short, or cannot be used."""
        if found.tokens * _LEAST_SHARE < len(ids):
            return None
        try:
            begun = self.load(found.key)
        except (CheckpointError, StateMismatch):
            return None  # the document is read from its first token
        rest = ids[found.tokens :]
        logits, state = extend(self.params, rest[None], [len(rest)], begun.with_room(len(rest)), progress=progress)
        _check_numbers(logits)
        return state


def _check_numbers(logits: Array) -> None:
    """Raise NumericalError if the logits [1, V] of a document's last token have a NaN. Its state is then no use."""
    if np.isnan(host_array(logits)).any():
        raise NumericalError(
            "logits must be numbers, got NaN in those of the document's last token, so nothing is stored; check the "
            "weights, or run the model in a wider dtype"
        )
