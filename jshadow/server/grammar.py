"""Grammars of answers, by llguidance (https://github.com/guidance-ai/llguidance)."""

import threading
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.weights.params import Params


class Grammars:
    """Makes the matchers of one model's tokens. Any thread may call it."""

    def __init__(self, params: Params) -> None:
        """Take the model. Its tokens are listed when the first matcher is made."""
        self.params, self.lock, self.tokens = params, threading.Lock(), None

    @staticmethod
    def problem(grammar: str) -> str:
        """Return why llguidance refuses a grammar, or ""."""
        from llguidance import LLMatcher

        return str(LLMatcher.validate_grammar(grammar))

    def matcher(self, grammar: str) -> "Matcher":
        """Return a matcher at the beginning of an answer. Raises ConfigError if the grammar is refused."""
        with self.lock:
            if self.tokens is None:
                from llguidance.hf import from_tokenizer

                config = self.params.config
                self.tokens = from_tokenizer(self.params.tokenizer, config.vocab_size, sorted(config.eos_ids))
        return Matcher(self.tokens, grammar)


class Matcher:
    """The place of one answer in its grammar."""

    def __init__(self, tokens: Any, grammar: str) -> None:
        """Begin. Raises ConfigError if the grammar is refused."""
        from llguidance import LLMatcher

        self.matcher = LLMatcher(tokens, grammar)
        self._check()

    def fill(self, words: np.ndarray) -> None:
        """Write the bit mask of the tokens that may come next, uint32 [W]. At the end, only the end tokens may.

        Raises:
            ConfigError: the grammar is too large for llguidance's limits.
        """
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()

    def push(self, token: int) -> None:
        """Take the next token. Raises ConfigError if the grammar does not allow it."""
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ConfigError(f"response_format cannot be followed: {self.matcher.get_error():.300}")
