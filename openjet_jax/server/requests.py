"""What a client may ask, as data: fields, their types and limits. Nothing else is accepted.

Fields of OpenAI's that have no meaning here are listed where clients send them with the one value
that changes nothing; any other value is refused like an unknown field, by name.
"""

import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field

from openjet_jax.server.errors import ApiError, bad_request
from openjet_jax.settings import MAX_TOP_LOGPROBS

MAX_STOPS, MAX_TOOLS, MAX_BIASES, MAX_NESTING = 16, 128, 1024, 64

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class Model(pydantic.BaseModel):
    """A JSON object without other fields than its own; numbers are not read from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(Model):
    """A piece of a message."""

    type: Literal["text"]
    text: str


type Content = str | list[TextPart]


class SystemMessage(Model):
    """Instructions; `developer` is OpenAI's newer name of the role."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Model):
    """What the user says."""

    role: Literal["user"]
    content: Content


class CalledFunction(Model):
    """A function's name and its arguments, JSON in a string."""

    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Model):
    """A call the model made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class AssistantMessage(Model):
    """What the model said. Fields that a client sends back empty are accepted empty."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MAX_TOOLS)
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Model):
    """What a call returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str


type Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Model):
    """A function that may be called; `strict` holds calls to the schema by a grammar."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """A tool; only functions are known."""

    type: Literal["function"]
    function: Function


class NamedFunction(Model):
    """The name of a function."""

    name: Name


class NamedTool(Model):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Model):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Model):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Model):
    """A schema, by a name."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Model):
    """JSON that a schema describes; it is kept to whether `strict` or not."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StreamOptions(Model):
    """What a stream holds besides text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(Model):
    """What chat and text completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    seed: Seed | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=256)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    user: None = None

    @property
    def alternatives(self) -> int:
        """Likeliest tokens to report beside each."""
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)
    chat_template_kwargs: dict[str, Any] | None = None
    store: Literal[False] | None = None
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=1)
    service_tier: Literal["auto", "default"] | None = None

    @property
    def alternatives(self) -> int:
        """As OpenAI has it, in a field of its own."""
        return self.top_logprobs or 0


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[int]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: None = None

    @property
    def alternatives(self) -> int:
        """As OpenAI has it, `logprobs` itself."""
        return self.logprobs or 0


def read_request[R: GenerationRequest](body: bytes, kind: type[R]) -> R:
    """Returns a request's body as data.

    Raises:
      ApiError: 400; it names the field.
    """
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    if _deeper(value, MAX_NESTING):
        raise bad_request(f"the body is nested more than {MAX_NESTING} levels deep")
    if (param := _unwritable(value)) is not None:
        raise bad_request(f"{param or 'a name'} has a lone surrogate, which is no text", param)
    try:
        return kind.model_validate(value)
    except pydantic.ValidationError as error:
        raise _refusal(error, value) from None


def _refusal(error: pydantic.ValidationError, body: dict[str, Any]) -> ApiError:
    """Returns the most specific thing wrong with a body."""
    faults = [
        (_path(fault["loc"], body, fault["type"]), fault)
        for fault in error.errors(include_url=False, include_context=False)
    ]
    # Of a union every branch complains; the one that got furthest is the one that was meant.
    param, fault = max(faults, key=lambda found: found[0].count(".") + found[0].count("["))
    if fault["type"] == "extra_forbidden":
        return bad_request(
            f"unknown or unsupported field: {param}; leave it out", param, "unsupported_parameter"
        )
    if fault["type"] == "missing":
        return bad_request(f"missing field: {param}", param, "missing_required_parameter")
    return bad_request(f"{param}: {fault['msg']}", param, "invalid_value")


def _path(location: tuple[int | str, ...], value: Any, kind: str) -> str:
    """Returns a field's path; names of a union's branches are left out of it."""
    path = ""
    for at, part in enumerate(location):
        last = at == len(location) - 1
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (last and kind == "missing")):
            path, value = f"{path}.{part}" if path else str(part), value.get(part)
    return path


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")


def _unwritable(value: Any) -> str | None:
    """Returns the path of a string that UTF-8 cannot hold, None if there is none."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in () if isinstance(value, str) else items:
            place = f"[{key}]" if isinstance(value, list) else str(key)
            if (inner := _unwritable(item)) is not None:
                return f"{place}.{inner}" if inner and inner[0] != "[" else place + inner
        return ""
    return None


def _deeper(value: Any, most: int) -> bool:
    """Returns whether lists and objects are nested more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
