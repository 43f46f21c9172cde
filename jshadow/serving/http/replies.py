"""The bodies of responses that are no answers."""

from typing import Literal

from pydantic import BaseModel


class FileObject(BaseModel):
    """A stored document in OpenAI's form.

    `bytes` are those of its state. `tokens` and `tier` are additions. `status_details` says why it cannot be used.
    """

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["user_data"] = "user_data"
    status: Literal["processed", "error"]
    status_details: str | None = None
    tokens: int
    tier: str


class FileList(BaseModel):
    """All stored documents."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: Literal[False] = False
    first_id: str | None = None
    last_id: str | None = None


class FileDeleted(BaseModel):
    """A document that was removed."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class ModelObject(BaseModel):
    """The model in OpenAI's form. `max_model_len` is the number of tokens of a prompt and its answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jshadow"
    max_model_len: int


class ModelList(BaseModel):
    """The one model."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


class Status(BaseModel):
    """The state of the server."""

    status: Literal["ok", "ready"]


class TierFigures(BaseModel):
    """Bytes of a tier of the library. `limit` None: no limit."""

    tier: str
    bytes: int
    limit: int | None


class RowFigures(BaseModel):
    """Planned bytes of the rows by memory."""

    device: int
    host: int


class Gauge(BaseModel):
    """The figures of the page.

    `stored_bytes` counts each document once, as it lies in the fastest tier that has it. `stored_device_bytes` are
    those of device memory if all documents were in use, and None if a document was not in memory yet.
    `full_attention_bytes` are those that the keys and values of all stored documents would take. `upload_limit` is the
    maximum size of a file in bytes, and `room` the maximum number of new tokens of an answer. `hit_share` is the share
    of the prompts' tokens that were stored.
    `first_token_seconds` is the mean of all answers, and None before the first. `busy_seconds_a_request` is the mean
    time of the engine since the programs were compiled.
    """

    model: str
    tiers: list[TierFigures]
    rows: RowFigures
    rows_in_use: int
    waiting: int
    stored_documents: int
    stored_tokens: int
    stored_bytes: int
    stored_device_bytes: int | None
    full_attention_bytes: int
    upload_limit: int
    room: int
    hit_share: float
    first_token_seconds: float | None
    busy_seconds_a_request: float
