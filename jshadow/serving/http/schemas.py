"""The bodies of requests and of replies, as pydantic models."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

MOST_LOGPROBS = 20
MOST_CHOICES = 16
MOST_STOPS, MOST_STOP = 16, 1024  # stop strings, and characters of one
MOST_PROMPTS, MOST_IDS, MOST_MESSAGES, MOST_TOOLS = 128, 2**20, 2**12, 1024
MOST_NAMES = 1024
INT64 = 2**63

# `fail_fast` stops at the first wrong value. The errors of a million wrong values would take a gigabyte.
Texts = Annotated[list[str], Field(max_length=MOST_PROMPTS, fail_fast=True)]
Ids = Annotated[list[int], Field(max_length=MOST_IDS, fail_fast=True)]
Stop = Annotated[str, Field(max_length=MOST_STOP)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def few(value: Any) -> Any:
    """Return a value. Raises ValueError if it is an object with too many names."""
    if isinstance(value, dict) and len(value) > MOST_NAMES:
        raise ValueError(f"an object must have at most {MOST_NAMES} names, got {len(value)}")
    return value


def _of_kind(kind: type) -> BeforeValidator:
    """Return a check of the type. In Python, 0 and 0.0 equal False, and so they would be the literal False."""

    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"must be of type {kind.__name__}")
        return value

    return BeforeValidator(check)


No = Annotated[Literal[False], _of_kind(bool)]
_Yes = Annotated[Literal[True], _of_kind(bool)]
_One = Annotated[Literal[1], _of_kind(int)]


class Body(BaseModel):
    """A body that refuses unknown fields, values of another type, and halves of surrogate pairs."""

    # A string is only checked to be Unicode if it has a limit. That of the whole body is lower.
    model_config = ConfigDict(extra="forbid", strict=True, str_max_length=2**31)

    @model_validator(mode="before")
    @classmethod
    def check_names(cls, value: Any) -> Any:
        """Refuse an object with too many names before each of them is looked at. Leave out the nulls."""
        value = few(value)
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> dict[str, Any]:
        """Return the JSON schema. Each field that may be absent may be null, and so may unknown ones."""
        reference = handler(core)
        schema = handler.resolve_ref_schema(reference)
        for name, one in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in one.get("anyOf", ()):
                schema["properties"][name] = {"anyOf": [one, {"type": "null"}]}
        schema["additionalProperties"] = {"type": "null"}
        return reference


class FilePart(Body):
    """The file of a content part: one that was uploaded before, or the data of one."""

    file_id: str | None = None
    filename: str | None = None
    file_data: str | None = None


class TextContent(Body):
    """A content part with text."""

    type: Literal["text"]
    text: str


class FileContent(Body):
    """A content part with a document."""

    type: Literal["file"]
    file: FilePart


class FunctionCall(Body):
    """The call of a function in an earlier answer. `arguments` is JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = None


class ToolCall(Body):
    """A tool call in an earlier answer. `index` comes from a stream, and is ignored."""

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextContent | FileContent], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    parsed: Any = None
    # vllm-router changes the name to `reasoning`.
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    """A JSON schema that an answer is to fit."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer. "regex" is an addition to OpenAI's forms."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class Routed(Body):
    """The fields that vllm-router adds to each request. Only its values are accepted, which change nothing."""

    continue_final_message: No = False
    ignore_eos: No = False
    include_reasoning: _Yes = True
    no_stop_trim: No = False
    return_hidden_states: No = False
    separate_reasoning: _Yes = True
    skip_special_tokens: _Yes = True
    stream_reasoning: _Yes = True


class TemplateSwitches(Body):
    """What a chat template may be told beside the chat. A template without such a switch ignores it."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class Drawing(Routed):
    """The fields that chats and completions share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(few)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    response_format: ResponseFormat | None = None
    # From here on, the fields that are ignored.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(few)] | None = None
    store: bool | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ChatRequest(Drawing):
    """The body of /v1/chat/completions."""

    messages: Messages
    add_special_tokens: No = False  # the template has them
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None


class CompletionRequest(Drawing):
    """The body of /v1/completions. The prompt is text or token ids, or a list of these."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(max_length=MOST_PROMPTS, fail_fast=True)]
    add_special_tokens: bool = True
    split_special_tokens: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: No | None = None
    suffix: None = None
    best_of: _One | None = None


class TokenizeRequest(Body):
    """The body of /tokenize: a text or a chat. A chat always has the beginning of the answer at its end."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    add_special_tokens: bool = True
    add_generation_prompt: _Yes = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(max_length=2**20, fail_fast=True)]


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
    rows_spilled: int
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
