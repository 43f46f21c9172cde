"""The object that all routes use. It has the model, the engine, the library and the figures."""

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from starlette.concurrency import run_in_threadpool

from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import Sampler
from jshadow.engine.text import encode as encode_prompt
from jshadow.errors import CapacityError, CheckpointError, JshadowError
from jshadow.library import Library, Stored
from jshadow.library.library import text_ids
from jshadow.serving import Answer, Engine, Piece, Request
from jshadow.serving.http.errors import ApiError
from jshadow.serving.http.forms import form_of, has_form
from jshadow.serving.http.grammar import Grammars
from jshadow.serving.http.keys import ApiKeys
from jshadow.serving.http.metrics import Metrics
from jshadow.serving.http.options import ServerOptions
from jshadow.serving.http.schemas import Drawing
from jshadow.serving.http.uploads import Upload, not_kept, text_of
from jshadow.weights.params import Params
from jshadow.weights.templates import beginning, document_ids, document_text, frame

_OFF = -1  # top_k of vLLM and others that turns the filter off


def _settings_of(body: Drawing, choice: int) -> RowSettings:
    """Return how the tokens of choice number `choice` are drawn. Raises ConfigError or ApiError."""
    temperature = 1.0 if body.temperature is None else body.temperature
    top_k = None if body.top_k in (None, 0, _OFF) else body.top_k
    seed = secrets.randbits(63) if body.seed is None else (body.seed + choice + 2**63) % 2**64 - 2**63
    return RowSettings(
        Sampler(
            temperature,
            top_k if temperature else None,
            body.top_p if temperature and body.top_p not in (None, 1.0) else None,
            body.min_p if temperature and body.min_p else None,
        ),
        seed=seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_bias_of(body.logit_bias or {}),
    )


def _bias_of(given: dict[str, float]) -> dict[int, float]:
    """Return a bias by token id. Raises ApiError if a key is not a token id."""
    bias = {}
    for token, value in given.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise ApiError(400, f"logit_bias must have token ids as keys, got {token!r:.80}", param="logit_bias")
        bias[int(token)] = value
    return bias


def most_new(
    engine: Engine, library: Library | None, ids: Sequence[int], asked: int | None, field: str = "max_tokens"
) -> int:
    """Return the maximum number of new tokens of a request.

    Without a wish, it is what a row has room for. The rest of the prompt after a stored document takes some of this
    room. If it takes more than half, the document is not used, and the answer has the whole room.

    Args:
        engine: the engine that is to answer.
        library: the library of the engine, or None.
        ids: token ids of the prompt.
        asked: the number that the request asks for, or None.
        field: the name of its field.

    Raises:
        ApiError: the prompt is too long for all classes of rows, or `asked` exceeds the room.
    """
    classes = [plan.row_class for plan in engine.plans]
    longest = max(one.prompt for one in classes)
    if len(ids) > longest:
        raise ApiError(
            400, f"the prompt must have at most {longest} tokens, got {len(ids)}", code="context_length_exceeded"
        )
    room = max(one.room for one in classes if one.prompt >= len(ids))
    if asked is not None:
        if asked > room:
            message = f"{field} must be at most {room} after a prompt of {len(ids)} tokens, got {asked}"
            raise ApiError(400, message, code="context_length_exceeded", param=field)
        return asked
    stored = None if library is None else library.longest(ids[:-1])
    if library is None or stored is None:
        return room
    left = min(max(one.room for one in classes) - (len(ids) - stored.tokens), library.capacity - len(ids))
    return left if 2 * left >= room else room


async def pieces(answer: Answer) -> AsyncIterator[Piece]:
    """Yield the pieces of an answer while they arrive. If the request fails, its error follows the last piece."""
    loop, changed, place = asyncio.get_running_loop(), asyncio.Event(), 0

    def notify() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(changed.set)

    answer.listen(notify)
    while True:
        changed.clear()
        new, done = answer.since(place)
        for piece in new:
            yield piece
        place += len(new)
        if done and not new:
            answer.result(0)  # raises the error of a request that failed
            return
        if not new:
            await changed.wait()


async def end_of(answer: Answer) -> None:
    """Wait for the end of an answer. Raises its error if the request failed."""
    async for _ in pieces(answer):
        pass


_T = TypeVar("_T")
FILE = "file-"
_KEY_DIGITS = 24  # hexadecimal digits of a document's key in the id of a file
_READ_AT_ONCE = 2  # files whose text is being read
_READING_PRIORITY = -1  # documents are read after the waiting questions


class Caller(NamedTuple):
    """Who asks, for fair turns, and the id of the HTTP request."""

    client: str
    request: str


class Service:
    """A model that answers HTTP requests.

    Attributes:
        params, engine, library, options: what the server was started with. The library may be None.
        metrics: the counters of the server.
        keys: the API keys, and what was used of their limits.
        created: when the server started, in seconds since 1970.
        draining: whether the server is about to end.
        ready: whether all programs are compiled.
        started: when their compilation began, by `time.monotonic`.
        compiled: how many parts of it are done, and how many there are.
        open: number of requests that are being answered, except those of health, metrics and the page.
        held: bytes of the bodies of all open requests, by client.
        parsing: lets one large body be parsed at a time.
        warm: seconds that the engine was busy before it took requests, and requests that it finished in them.
    """

    def __init__(self, engine: Engine, library: Library | None, options: ServerOptions) -> None:
        self.engine, self.library, self.options = engine, library, options
        self.params: Params = engine.params
        self.grammars = Grammars(self.params)
        self.metrics = Metrics(self)
        self.keys = ApiKeys(options.api_keys, options.api_key_file)
        self.created = int(time.time())
        self.draining = self.ready = False
        self.started, self.compiled = time.monotonic(), (0, 0)
        self.open, self.held = 0, Counter[str]()
        self.warm = 0.0, 0
        self._reading: dict[str, _Turn] = {}  # by the key of the document
        self._files = anyio.CapacityLimiter(_READ_AT_ONCE)
        self.parsing, self._forms = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)

    def begin(self) -> None:
        """Take requests from now on. The time of the engine until now, in which it compiled, does not count."""
        counts = self.engine.report().counts
        self.warm = counts.busy_seconds, counts.finished
        self.ready = True

    def compiling(self, done: int, count: int) -> None:
        """Note how many parts of the compilation are done, of how many."""
        if not done:
            self.started = time.monotonic()
        self.compiled = done, count

    @property
    def unready(self) -> str:
        """Why the server is not ready yet, with a guess of the seconds that are left."""
        (done, count), seconds = self.compiled, time.monotonic() - self.started
        left = f", about {seconds * (count - done) / done:.0f} s are left" if done else ""
        return f"the server compiles its programs: {done} of {count} parts are done after {seconds:.0f} s{left}"

    @property
    def busy(self) -> bool:
        """Whether a request is open or a state is being written."""
        return bool(self.open or (self.library is not None and self.library.catalog.unwritten_yet()))

    @property
    def uploads(self) -> int:
        """Number of requests whose document is being read, or waits for it."""
        return sum(turn.waiting for turn in list(self._reading.values()))

    # Answers

    async def submit(self, *requests: Request) -> list[Answer]:
        """Give requests to the engine, all or none. Raises the errors of `Engine.submit_all`."""
        return await run_in_threadpool(self.engine.submit_all, requests)

    def requests(
        self, caller: Caller, body: Drawing, ids: list[int], most: int, logprobs: int | None, grammar: str | None
    ) -> list[Request]:
        """Return the requests of all choices of one prompt.

        Args:
            caller: who asks.
            body: the body of the HTTP request.
            ids: token ids of the prompt.
            most: maximum number of new tokens.
            logprobs: number of likeliest tokens of which log-probabilities are wanted, or None.
            grammar: what `form_of` returned.

        Raises:
            ConfigError, ApiError: a value is out of range.
        """
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        first = None if grammar is None else self.grammars.matcher(grammar)
        return [
            Request(
                ids,
                most,
                _settings_of(body, choice),
                client=caller.client,
                name=caller.request,
                stop=stop or None,
                logprobs=logprobs,
                allowed=first and first.copy(),
            )
            for choice in range(body.n or 1)
        ]

    def encode(self, prompt: str | list[int], *, special: bool = True, plain: bool = False) -> list[int]:
        """Return the token ids of the prompt of a completion.

        Args:
            prompt: text or token ids.
            special: whether the special tokens that begin and end a sequence are put around a text.
            plain: whether the texts of special tokens in a text are plain text.

        Raises:
            PromptError, CapacityError: the prompt is empty, too long, or has a token id that is out of range.
        """
        self.check_length(prompt)
        return encode_prompt(self.params.tokenizer, prompt, self.params.config.vocab_size, special=special, plain=plain)

    def check_length(self, text: str | list[int]) -> None:
        """Raise CapacityError if a prompt has more bytes or tokens than any can have. Encoding it can take minutes."""
        if isinstance(text, list):
            if len(text) > self.most_tokens:
                raise CapacityError(f"the prompt must have at most {self.most_tokens} tokens, got {len(text)}")
            return
        most = self.most_tokens * self.longest_token
        if len(text) > most or len(text.encode("utf-8", "surrogatepass")) > most:
            raise CapacityError(
                f"the text must have at most {most} bytes, which are {self.most_tokens} tokens of at most "
                f"{self.longest_token} bytes, got more"
            )

    @functools.cached_property
    def longest_token(self) -> int:
        """The bytes of the longest token of the vocabulary."""
        return max(len(token.encode("utf-8", "surrogatepass")) for token in self.params.tokenizer.get_vocab())

    def cancel(self, answers: Sequence[Answer]) -> None:
        """Cancel the answers that are not complete."""
        for answer in answers:
            if not answer.done:
                self.engine.cancel(answer)

    async def slowly(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run a function that reads files or encodes texts in another thread."""
        return await run_in_threadpool(function, *args)

    async def form(self, body: Drawing, template: str = "") -> str | None:
        """Return what `form_of` returns. Only requests with a grammar wait for the check of another grammar."""
        args, limiter = (body, self.params.tokenizer, template), self._forms if has_form(body) else None
        return await anyio.to_thread.run_sync(form_of, *args, limiter=limiter, abandon_on_cancel=True)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name is not None and name != self.options.name:
            raise ApiError(
                404, f"model must be {self.options.name!r}, got {name!r:.80}", code="model_not_found", param="model"
            )

    # Figures

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return max(plan.row_class.capacity for plan in self.engine.plans)

    def tiers(self) -> list[tuple[str, int, int | None]]:
        """Return the name, the used bytes and the limit of each tier of the library."""
        return [] if self.library is None else self.library.tier_bytes()

    def gauge(self) -> dict[str, Any]:
        """Return the figures of the page. Bytes of full attention are those of its keys and values alone."""
        report = self.engine.report()
        counts = report.counts
        documents = [] if self.library is None else [one for one in self.library.documents() if one.problem is None]
        config, itemsize = self.params.config, np.dtype(self.params.dtype).itemsize
        attending = (layer for layer, kind in enumerate(config.attention_kinds) if not kind.recurrent)
        token_bytes = 2 * sum(config.at(layer).key_columns for layer in attending) * itemsize
        tokens, on_device = sum(one.tokens for one in documents), [one.device_bytes for one in documents]
        busy, finished = counts.busy_seconds - self.warm[0], counts.finished - self.warm[1]
        return {
            "model": self.options.name,
            "tiers": [{"tier": tier, "bytes": used, "limit": limit} for tier, used, limit in self.tiers()],
            "rows": {"device": report.device_bytes, "host": report.host_bytes},
            "rows_in_use": report.rows_in_use,
            "rows_spilled": report.rows_spilled,
            "waiting": report.waiting,
            "stored_documents": len(documents),
            "stored_tokens": tokens,
            "stored_bytes": sum(one.bytes for one in documents),
            "stored_device_bytes": None if None in on_device else sum(size or 0 for size in on_device),
            "full_attention_bytes": tokens * token_bytes,
            "upload_limit": self.options.upload_bytes,
            "room": max(plan.row_class.room for plan in self.engine.plans),
            "hit_share": self.metrics.hit_share,
            "first_token_seconds": self.metrics.first_token_seconds,
            "busy_seconds_a_request": busy / max(finished, 1),
        }

    # Documents

    def shelf(self) -> Library:
        """Return the library. Raises ApiError if the server has none."""
        if self.library is None:
            raise ApiError(404, "the server was started without --library, so it stores no files", code="no_library")
        return self.library

    def look(self) -> None:
        """Notice the documents that other servers have put into the object store and removed. Raises ApiError."""
        try:
            self.shelf().look()
        except CheckpointError as error:
            raise ApiError(503, str(error), code="store_unavailable") from error

    def _found(self, file_id: str) -> list[Stored]:
        return [one for one in self.shelf().documents() if file_id == file_id_of(one)]

    def file_time(self, stored: Stored) -> int:
        """Return the time of a document's file, or the server's start if it has none, in seconds since 1970."""
        try:
            return int(self.shelf().files.directory.path(stored.key).stat().st_mtime)
        except OSError:
            return self.created

    def file(self, file_id: str) -> Stored:
        """Return the stored document of a file's id. Raises ApiError if there is none, also in the object store."""
        found = self._found(file_id)
        if not found:
            self.look()
            found = self._found(file_id)
        if not found:
            raise ApiError(404, f"file_id must be that of a stored file, got {file_id!r:.80}", code="file_not_found")
        return found[0]

    def file_tokens(self, file_id: str) -> list[int]:
        """Return the token ids of a stored document, as the first thing in a chat. Raises ApiError."""
        stored = self.file(file_id)
        if stored.problem is not None:
            raise ApiError(409, f"file {file_id} cannot be used: {stored.problem}", code="damaged_file")
        ids: list[int] = self.shelf().ids(stored.key).tolist()
        if not beginning(self.params.tokenizer).begins(self.params.tokenizer, ids):
            message = f"file {file_id} does not begin as a chat begins with this model: delete it, and add it again"
            raise ApiError(409, message, code="other_beginning")
        return ids

    def file_text(self, file_id: str) -> str:
        """Return the text of a stored document, decoded from its tokens. Raises ApiError."""
        return document_text(self.params.tokenizer, self.file_tokens(file_id))

    async def text_of(self, upload: Upload) -> str:
        """Return the text of a file. Few files are read at once, apart from all other work of the server.

        If the request ends meanwhile, the process that reads a PDF is killed.

        Raises:
            CheckpointError: the file has no text that can be read, or reading it exceeds a limit.
            ApiError: the disk has no room for the file.
        """
        processes: list[subprocess.Popen[bytes]] = []
        ended = False

        def begun(process: "subprocess.Popen[bytes]") -> None:
            processes.append(process)
            if ended:
                process.kill()

        try:
            read = functools.partial(text_of, upload, begun)
            return await anyio.to_thread.run_sync(read, limiter=self._files, abandon_on_cancel=True)
        finally:
            ended = True
            for process in processes:
                process.kill()

    async def text_tokens(self, upload: Upload) -> list[int]:
        """Return the token ids of a file that is not stored, as the first thing in a chat. Raises as `text_of`."""
        text = await self.text_of(upload)
        self.check_length(text)
        return await self.slowly(document_ids, self.params.tokenizer, text)

    async def add(self, upload: Upload, caller: Caller) -> Stored:
        """Read a document with the engine, and store its state. A document that is stored is not read again.

        Equal documents that come at once are read once.

        Raises:
            CheckpointError: the file has no text that can be read.
            CapacityError: the document exceeds the capacity of the library.
            ApiError: no question fits behind the document, or the state cannot be stored, such as on a full disk.
        """
        library = self.shelf()
        text = await self.text_of(upload)
        self.check_length(text)
        ids = await self.slowly(text_ids, text, self.params)
        asked = len((await self.slowly(frame, self.params.tokenizer, "?"))[1])
        most = max(plan.row_class.prompt for plan in self.engine.plans) - asked
        if len(ids) > most:
            message = f"the file must have at most {most} tokens, so that a question fits behind it, got {len(ids)}"
            raise ApiError(400, message, code="context_length_exceeded", param="file")
        key = library.identity.key(ids)
        turn = self._reading.setdefault(key, _Turn())
        turn.waiting += 1
        try:
            async with turn.lock:
                await self.slowly(self.look)
                found = await self.slowly(library.longest, ids)
                if found is None or found.tokens < len(ids):
                    await self._read(upload.name, ids.tolist(), caller)
                    found = await self.slowly(library.longest, ids)
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._reading[key]
        if found is None or found.tokens < len(ids):
            raise not_kept(upload.name, "its state was read, but is not stored any more")
        return found

    async def _read(self, name: str, ids: list[int], caller: Caller) -> None:
        """Read a document, and wait until its state is stored. If the caller is cancelled, the reading ends."""
        options: dict[str, Any] = {"priority": _READING_PRIORITY, "store": True, "title": name}
        [answer] = await self.submit(Request(ids, 1, client=caller.client, name=caller.request, **options))
        try:
            await end_of(answer)
            report = answer.result(0).report
        finally:
            self.cancel([answer])
        if report.stored is None:
            raise not_kept(name, report.not_stored)
        try:
            await asyncio.shield(asyncio.wrap_future(report.stored))
        except (JshadowError, OSError) as error:
            raise not_kept(name, error) from error


@dataclasses.dataclass
class _Turn:
    """The requests that add one document: one reads it, the others wait.

    Attributes:
        lock: held by the one that reads.
        waiting: number of the requests.
    """

    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    waiting: int = 0


def file_id_of(stored: Stored) -> str:
    """Return the id of the file that a stored document came from."""
    return FILE + stored.key[:_KEY_DIGITS]
