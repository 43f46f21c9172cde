"""A question about a stored text: how it is framed, and the generation that answers it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateOptions
from jshadow.engine.text import encode as encode_prompt
from jshadow.engine.types import OnePrompt
from jshadow.library.shelf import ANSWER, DOCUMENT
from jshadow.ops.buckets import round_up
from jshadow.weights.params import Params
from jshadow.weights.templates import follow_up, frame, has_template

if TYPE_CHECKING:
    from jshadow.library.library import Library

ROOM_STEP = 64  # rooms are rounded up to a multiple of this, so that similar questions share compiled programs
PLAIN_STOP = "\nQuestion:"  # for a model without a chat template


class Asking:
    """One question about a stored text.

    Attributes:
        loop: the generation. Iterate over it, and then call `Library.finish`.
        before: the token ids of the stored text, int32 [n].
        ids: the token ids of the question.
        title: the title of the stored text.
        store: whether the state at the end of the answer is to be stored.
    """

    def __init__(
        self, library: "Library", key: str, question: OnePrompt, options: Mapping[str, Any], *, store: bool
    ) -> None:
        """Load the text, and begin a generation. Nothing of the question is read yet.

        Args:
            library, key, question, store: as in `Library.ask`.
            options: `max_new_tokens` and other options of `GenerateOptions`, without the state.

        Raises:
            As `Library.ask`.
        """
        state = library.load(key)
        entry = library.catalog.entry(key)
        note, self.before, self.store = entry.note, entry.ids, store
        self.title, ends = note.get("title", ""), note.get("ends", "")
        self.ids = question_ids(library.params, question, ends, int(self.before[-1]))
        tokenizer, fields = library.params.tokenizer, dict(options)
        if isinstance(question, str) and ends and fields.get("stop") is None and not has_template(tokenizer):
            fields["stop"] = PLAIN_STOP
        needed = len(self.ids) + options["max_new_tokens"]
        room = min(round_up(needed, ROOM_STEP), library.capacity - len(self.before))
        fields |= {"state": state.with_room(max(needed, room)), "returns_state": store, "before": [self.before]}
        self.loop = GenerationLoop(library.params, self.ids, GenerateOptions(**fields))


def question_ids(params: Params, question: OnePrompt, ends: str, last: int) -> list[int]:
    """Return the token ids of a question.

    Args:
        params: the model.
        question: text, token ids or a chat.
        ends: what the text before it ends with: "document", "answer" or "".
        last: the last token of the text before it.

    Raises:
        PromptError: the question is empty, or it is text and there is no tokenizer.
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
