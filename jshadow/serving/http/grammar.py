"""Grammars of answers, by llguidance (https://github.com/guidance-ai/llguidance)."""

import copy
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jshadow.engine.rows import WORD
from jshadow.errors import ConfigError
from jshadow.serving.http import grammar_worker
from jshadow.weights.params import Params


class Grammars:
    """Makes the matchers of one model's tokens. Any thread may call it."""

    def __init__(self, params: Params) -> None:
        """Take the model. Its tokens are listed when the first matcher is made."""
        self.params, self.lock = params, threading.Lock()
        self.tokens: Any = None

    def matcher(self, grammar: str) -> "_Matcher":
        """Return a matcher at the beginning of an answer. `problem` has found nothing in the grammar.

        Raises:
            ConfigError: the grammar is refused, or the model has no end token.
        """
        config = self.params.config
        if not config.eos_ids:
            raise ConfigError("response_format needs a model with an end token, and its config has none")
        with self.lock:
            if self.tokens is None:
                self.tokens = _tokens_of(self.params.tokenizer, config.vocab_size, sorted(config.eos_ids))
        return _Matcher(self.tokens, grammar, config.vocab_size)


class _Checker:
    """Another process that checks grammars, one after the other (grammar_worker.py). It starts when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, grammar: str) -> str:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.process = self._started()
            sent, answered = self.process.stdin, self.process.stdout
            assert sent is not None
            assert answered is not None
            try:
                sent.write(json.dumps(grammar) + "\n")
                sent.flush()
                line = answered.readline()
            except OSError:
                line = ""
            if not line:  # a limit has ended it
                self.process.communicate()
        return str(json.loads(line)) if line else _TOO_LARGE

    @staticmethod
    def _started() -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", grammar_worker.__file__]
        inner, quiet = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, stdin=inner, stdout=inner, stderr=quiet, text=True, start_new_session=True)


_TOO_LARGE = "schema: it takes too much time or memory to follow, or its references are nested too deeply"
problem = _Checker()  # maps a grammar to why it is refused, or ""


def _tokens_of(tokenizer: Any, size: int, ends: list[int]) -> Any:
    """Return the tokens of a model for llguidance: those of the tokenizer, or `size` if the model has more."""
    from llguidance import LLTokenizer
    from llguidance.hf import from_tokenizer

    size = max(size, len(tokenizer))
    tokens = from_tokenizer(tokenizer, size, ends)
    renamed = {
        index: f"\ue000{index}\ue001" for index in tokenizer.added_tokens_decoder if tokens.is_special_token(index)
    }
    if not renamed:
        return tokens
    data = json.loads(tokenizer.backend_tokenizer.to_str()) | dict.fromkeys(("padding", "truncation", "post_processor"))
    for added in data["added_tokens"]:
        if added["id"] in renamed:
            added |= {"content": renamed[added["id"]], "special": True}
    vocab = data["model"].get("vocab")
    if isinstance(vocab, dict):
        data["model"]["vocab"] = {renamed.get(index, name): index for name, index in vocab.items()}
    elif vocab is not None:
        data["model"]["vocab"] = [[renamed.get(index, name), score] for index, (name, score) in enumerate(vocab)]
    return LLTokenizer(json.dumps(data), n_vocab=size, eos_token=ends)


class _Matcher:
    """The place of one answer in its grammar. It is the function `Request.allowed` of that answer."""

    def __init__(self, tokens: Any, grammar: str, size: int) -> None:
        """Begin, for a vocabulary of `size` tokens. Raises ConfigError if the grammar is refused."""
        from llguidance import LLMatcher

        self.matcher, self.size = LLMatcher(tokens, grammar), -(-size // WORD)
        self.words, self.taken = np.zeros(-(-tokens.vocab_size // WORD), np.uint32), 0
        self._check()

    def copy(self) -> "_Matcher":
        """Return another matcher at the same place. It takes a fraction of the time of the first one."""
        other = copy.copy(self)
        other.matcher, other.words = self.matcher.deep_copy(), self.words.copy()
        return other

    def __call__(self, drawn: Sequence[int]) -> np.ndarray:
        """Return the bit mask of the tokens that may follow `drawn`, uint32 [W]. At the end, only end tokens may.

        `drawn` has all tokens of the answer, and begins with those of the call before.

        Raises:
            ConfigError: the grammar is too large for llguidance's limits.
        """
        for token in drawn[self.taken :]:
            if not self.matcher.is_stopped():
                self.matcher.consume_token(token)
        self.taken = len(drawn)
        self._check()
        self.matcher.unsafe_compute_mask_ptr(self.words.ctypes.data, self.words.nbytes)
        self._check()
        return self.words[: self.size]

    def _check(self) -> None:
        if self.matcher.is_error():
            reason = reason_of(str(self.matcher.get_error()))
            raise ConfigError(f"response_format or tools cannot be followed: {reason:.300}")


def reason_of(problem: str) -> str:
    """Return the sentence that tells a client why llguidance refuses a grammar."""
    if problem.startswith("NoExtensionBias"):
        return "no text fits it; a schema that refers to itself must be able to end"
    _, found, error = problem.partition("\nerror: ")
    if found:  # of a regular expression, which stands in the first line or in the second
        return "the regular expression has an error: " + error.partition("\n")[0]
    return problem.partition("\n")[0].rpartition("schema: ")[2]
