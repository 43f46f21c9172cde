"""Probes of a user's own document: its passages, continued from their beginnings, or questions about it."""

from collections.abc import Iterator, Sequence
from typing import Any

from jshadow.errors import CapacityError, ConfigError
from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.weights.templates import frame
from jshadow.weights.tokenizer import encode, encode_plain, opening

LEAST = 512  # tokens of a document, so that its passages do not overlap
ANSWER = 64  # tokens of an answer, at most
_PASSAGES = 15
_LEAD, _FOLLOWING = 16, 32  # tokens of a passage that are fed, and that are compared
Probe = tuple[tuple[int, ...], tuple[int, ...]]  # see Case.probes


def document_case(tokenizer: Any, name: str, text: str, questions: Sequence[str], room: int) -> Case:
    """Return a case whose prompt is a document, with probes after it.

    With questions, each is a probe, and full attention's answer of up to ANSWER tokens is what follows it. Without, the
    beginning of a passage is fed, and the rest of it follows. The passages are spread evenly over the document, so that
    a policy must find what it has read at any depth. The last probe continues the document itself: its last tokens are
    not part of the prompt.

    Args:
        name: name of the document, for error messages.
        text: the document.
        questions: questions about it, or none.
        room: maximum number of tokens of the document and a probe together: the model's context.

    Raises:
        ConfigError: there is no tokenizer, or the document has fewer than LEAST tokens.
        CapacityError: the document is too long.
    """
    if tokenizer is None:
        raise ConfigError("advice needs a tokenizer, and the checkpoint has none")
    ids = tuple(encode_plain(tokenizer, text))
    if len(ids) < LEAST:
        raise ConfigError(f"document {name} must have at least {LEAST} tokens, got {len(ids):,}")
    if questions:
        framed = [frame(tokenizer, one, "") for one in questions]
        probes: list[Probe] = [(tuple(after), ()) for _, after in framed]
        case = Case((_sample(ANSWER),), (*framed[0][0], *ids), probes=tuple(probes))
    else:
        end = len(ids) - _LEAD - _FOLLOWING
        probes = [*_passages(tokenizer, ids[:end]), (ids[end : end + _LEAD], ids[end + _LEAD :])]
        case = Case((_sample(_FOLLOWING),), (*opening(tokenizer), *ids[:end]), probes=tuple(probes))
    if (needed := len(case.prompt) + case.growth) > room:
        raise CapacityError(
            f"document {name} must fit the model's context={room:,} with its probes, got {needed:,} tokens"
        )
    return case


def _sample(most: int) -> Sample:
    return Sample("", "", "", "", most)


def _passages(tokenizer: Any, ids: tuple[int, ...]) -> Iterator[Probe]:
    size, gap = _LEAD + _FOLLOWING, tuple(encode(tokenizer, "\n\n"))
    for index in range(_PASSAGES):
        start = (len(ids) - size) * index // (_PASSAGES - 1)
        yield (*gap, *ids[start : start + _LEAD]), ids[start + _LEAD : start + size]
