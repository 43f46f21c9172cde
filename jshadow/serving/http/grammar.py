"""Grammars of answers, by llguidance (https://github.com/guidance-ai/llguidance)."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.weights.params import Params


class Grammars:
    """Makes the matchers of one model's tokens. Any thread may call it."""

    def __init__(self, params: Params) -> None:
        """Take the model. Its tokens are listed when the first matcher is made."""
        self.params, self.lock = params, threading.Lock()
        self.tokens: Any = None

    @staticmethod
    def problem(grammar: str) -> str:
        """Return why llguidance refuses a grammar, or ""."""
        from llguidance import LLMatcher

        return str(LLMatcher.validate_grammar(grammar))

    def matcher(self, grammar: str) -> "Matcher":
        """Return a matcher at the beginning of an answer.

        Raises:
            ConfigError: the grammar is refused, or the model has no end token.
        """
        config = self.params.config
        if not config.eos_ids:
            raise ConfigError("response_format needs a model with an end token, and its config has none")
        with self.lock:
            if self.tokens is None:
                from llguidance.hf import from_tokenizer

                self.tokens = from_tokenizer(self.params.tokenizer, config.vocab_size, sorted(config.eos_ids))
        return Matcher(self.tokens, grammar, config.vocab_size)


class Matcher:
    """The place of one answer in its grammar. It is the function `Request.allowed` of that answer."""

    def __init__(self, tokens: Any, grammar: str, size: int) -> None:
        """Begin, for a vocabulary of `size` tokens. Raises ConfigError if the grammar is refused."""
        from llguidance import LLMatcher

        self.matcher = LLMatcher(tokens, grammar)
        self.words, self.taken = np.zeros(-(-size // 32), np.uint32), 0
        self._check()

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
        return self.words

    def _check(self) -> None:
        if self.matcher.is_error():
            reason = str(self.matcher.get_error()).partition("\n")[0]
            raise ConfigError(f"response_format or tools cannot be followed: {reason:.300}")
