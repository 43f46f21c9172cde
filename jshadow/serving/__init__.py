"""A serving engine for many requests at once: `Engine`, `RowClass`, `Request` and what they return."""

from jshadow.engine.rows import RowSettings as RowSettings
from jshadow.serving.admission import EngineOptions as EngineOptions
from jshadow.serving.admission import Limits as Limits
from jshadow.serving.admission import RowClass as RowClass
from jshadow.serving.engine import Engine as Engine
from jshadow.serving.loop import Counts as Counts
from jshadow.serving.loop import EngineReport as EngineReport
from jshadow.serving.requests import Answer as Answer
from jshadow.serving.requests import AnswerReport as AnswerReport
from jshadow.serving.requests import AnswerResult as AnswerResult
from jshadow.serving.requests import Logprobs as Logprobs
from jshadow.serving.requests import Piece as Piece
from jshadow.serving.requests import Request as Request
