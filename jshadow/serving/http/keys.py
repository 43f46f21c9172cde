"""API keys with the limits of each. The file that has them is read again when it has changed."""

import collections
import dataclasses
import hashlib
import hmac
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jshadow.errors import CheckpointError, JshadowError, check_integer
from jshadow.serving.http.errors import ApiError
from jshadow.weights.tokenizer import read_text

_LOG = logging.getLogger(__name__)
_WINDOW = 60.0  # seconds in which requests and tokens are counted
_LOOK_SECONDS = 1.0  # a change of the file is noticed after so many seconds


@dataclasses.dataclass(frozen=True)
class KeyLimits:
    """The limits of one key. None means no limit.

    Attributes:
        requests: requests that begin within a minute.
        open: requests that are open at the same time.
        tokens: tokens of prompts, answers and uploaded documents within a minute. They count when an answer is
            complete. So a request that begins below the limit is answered whole.

    Raises:
        ConfigError: a limit is neither None nor an integer of at least 1.
    """

    requests: int | None = None
    open: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_integer(name, value, least=1)


def read_keys(path: Path) -> dict[str, KeyLimits]:
    """Return the API keys of a file: one on each line, with its limits, such as `KEY requests=60 tokens=100000`.

    Empty lines and lines that begin with # do not count.

    Raises:
        CheckpointError: the file cannot be read, has no key in it or one key twice, or a limit is wrong.
    """
    try:
        lines = [line.split() for line in read_text(path.expanduser()).splitlines()]
    except (OSError, UnicodeError) as error:
        raise CheckpointError(f"{path} must be a readable UTF-8 file of API keys: {error}") from error
    keys: dict[str, KeyLimits] = {}
    for number, words in enumerate(lines, start=1):
        if not words or words[0].startswith("#"):
            continue
        place, fields = f"line {number} of {path}", dict[str, int]()
        if words[0] in keys:
            raise CheckpointError(f"{place} must have another key than each line before it, got one of theirs again")
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name not in KeyLimits.__dataclass_fields__ or name in fields or not value.isdecimal():
                known = ", ".join(f"{one}=NUMBER" for one in KeyLimits.__dataclass_fields__)
                raise CheckpointError(f"{place} must have a key and limits, each once ({known}), got {word!r:.80}")
            fields[name] = int(value[:20])
        try:
            keys[words[0]] = KeyLimits(**fields)
        except JshadowError as error:
            raise CheckpointError(f"{place}: {error}") from error
    if not keys:
        raise CheckpointError(f"{path} must have at least one API key in it, got none")
    return keys


def digest_of(key: bytes) -> str:
    """Return the SHA-256 of a key in hexadecimal digits, so that all compared values have one length."""
    return hashlib.sha256(key).hexdigest()


@dataclasses.dataclass
class _Used:
    """The use of one key within the last minute.

    Attributes:
        requests: when each request of the last minute began.
        tokens: when each answer of the last minute was complete, and its tokens.
        open: the number of open requests.
    """

    requests: collections.deque[float] = dataclasses.field(default_factory=collections.deque)
    tokens: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)
    open: int = 0

    def forget(self, now: float) -> None:
        """Forget what lies before the last minute."""
        while self.requests and self.requests[0] <= now - _WINDOW:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - _WINDOW:
            self.tokens.popleft()


class ApiKeys:
    """The keys of a server. All methods may be called from any thread.

    Attributes:
        limits: the limits of each key, by the digest of the key. Empty: no key is asked for.
    """

    def __init__(
        self, keys: Mapping[str, KeyLimits], path: Path | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Take the keys, and the file that they are from, or None. `clock` returns seconds."""
        self.path, self._clock, self._lock = path, clock, threading.Lock()
        self.limits = {digest_of(key.encode()): limits for key, limits in keys.items()}
        self._used: dict[str, _Used] = {}
        self._stamp, self._looked = self._stamp_of_file(), clock()

    def __bool__(self) -> bool:
        return bool(self.limits)

    def _stamp_of_file(self) -> tuple[int, int, int] | None:
        try:
            found = None if self.path is None else self.path.expanduser().stat()
        except OSError:
            return None
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)

    def look(self) -> None:
        """Read the file again if it has changed. If it has a fault, the keys stay as they are, and the log says why."""
        now = self._clock()
        if self.path is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked, stamp = now, self._stamp_of_file()
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = read_keys(self.path)
        except CheckpointError as error:
            _LOG.error("the API keys stay as they were: %s", error)
            return
        with self._lock:
            self.limits = {digest_of(key.encode()): limits for key, limits in keys.items()}
            self._used = {key: used for key, used in self._used.items() if key in self.limits or used.open}
        _LOG.warning("the API keys were read again: %d of them", len(keys))

    def knows(self, kind: bytes, digest: str) -> bool:
        """Compare the digest of a key with those of all keys in a time that depends on neither."""
        found = [hmac.compare_digest(digest, key) for key in list(self.limits)]
        return kind == b"bearer" and any(found)

    def begin(self, digest: str) -> ApiError | None:
        """Begin a request with a known key. Return why it is refused, or None. Then `end` must follow."""
        if not self.limits:
            return None
        now = self._clock()
        with self._lock:
            limits, used = self.limits.get(digest, KeyLimits()), self._used.setdefault(digest, _Used())
            used.forget(now)
            if limits.open is not None and used.open >= limits.open:
                return _refused(f"the key may have open={limits.open} requests at a time", f"{used.open} are open", 1.0)
            if limits.requests is not None and len(used.requests) >= limits.requests:
                again = used.requests[-limits.requests] + _WINDOW - now
                got = f"{len(used.requests)} have begun"
                return _refused(f"the key may have requests={limits.requests} a minute", got, again)
            held = sum(count for _, count in used.tokens)
            if limits.tokens is not None and held >= limits.tokens:
                got, left = f"{held} were used", held
                for at, count in used.tokens:
                    left -= count
                    if left < limits.tokens:
                        return _refused(f"the key may use tokens={limits.tokens} a minute", got, at + _WINDOW - now)
            used.requests.append(now)
            used.open += 1
            return None

    def end(self, digest: str) -> None:
        """End a request that has begun."""
        with self._lock:
            if (used := self._used.get(digest)) is not None:
                used.open -= 1

    def spend(self, digest: str, tokens: int) -> None:
        """Count the tokens of a complete answer, or of a document that was read."""
        with self._lock:
            limits = self.limits.get(digest)
            if limits is not None and limits.tokens is not None and digest in self._used:
                self._used[digest].tokens.append((self._clock(), tokens))


def _refused(limit: str, got: str, seconds: float) -> ApiError:
    return ApiError(429, f"{limit}, {got}", code="rate_limit_exceeded", retry=max(1, math.ceil(seconds)))
