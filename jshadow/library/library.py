"""Library: texts that a model has read once. They can be asked at any time, also after a restart."""

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine.checks import check_capacity
from jshadow.engine.decode import extend
from jshadow.engine.generation import Generation
from jshadow.engine.options import batch_of
from jshadow.engine.prefill.whole import prefill_many
from jshadow.engine.sampling import Sampler
from jshadow.engine.types import OnePrompt, Progress
from jshadow.errors import CheckpointError, NumericalError, StateMismatch
from jshadow.library.asking import Asking, question_ids
from jshadow.library.shelf import ANSWER, DOCUMENT, Stored
from jshadow.library.sources import Source, ids_of
from jshadow.library.state_store import StateStore
from jshadow.weights.digest import host_array

LEAST_SHARE = 2  # a stored beginning is extended if it has at least 1 / LEAST_SHARE of the tokens


@dataclasses.dataclass(frozen=True)
class Reply(Generation):
    """The answer of `Library.ask`.

    Attributes:
        key: the key of the state at the end of the answer, or None if it was not stored.
    """

    key: str | None = None


class Library(StateStore):
    """States of texts that a model has read once.

    A state is found by a SHA-256 of the model, the policy, the dtype, the capacity, the fetch mode and the token ids.
    It lies in the fastest tier that has room: device memory, pinned host memory, disk, an object store. A state that is
    stored durably also has a file, and is there again after a restart.

    All methods can be called from any thread. No lock is held while a model runs, or while a file is read, hashed or
    written. Two threads that add the same document read it once.
    """

    def add(self, source: Source, *, title: str | None = None, progress: Progress | None = None) -> Stored:
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

        A serving engine with this library finds the stored text at the beginning of these ids.

        Args:
            key, question: as in `ask`.

        Raises:
            CheckpointError: there is no such text.
            PromptError: the question is empty, or it is text and there is no tokenizer.
        """
        entry = self.catalog.entry(key)
        asked = question_ids(self.params, question, entry.note.get("ends", ""), int(entry.ids[-1]))
        return [*entry.ids.tolist(), *asked]

    def finish(self, asking: Asking) -> Reply:
        """Return the answer of an `Asking` whose loop has ended, and store its state if that was asked for."""
        [generation] = asking.loop.results()
        key = None
        if asking.store:
            ids = [*asking.before.tolist(), *asking.ids, *generation.tokens]
            key = self.store(ids, generation.state, title=asking.title, ends=ANSWER)
        return Reply(**vars(generation), key=key)

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
        width = batch_of([len(ids)], self.capacity, str(self.params.dtype)).width
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
        if found.tokens * LEAST_SHARE < len(ids):
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
