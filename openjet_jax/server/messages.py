"""From a request's messages and tools to the ids of a prompt, by the model's own template."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from openjet_jax.chat import ChatError
from openjet_jax.loading import Model
from openjet_jax.server.arguments import written
from openjet_jax.server.errors import bad_request
from openjet_jax.server.parsing import THINK
from openjet_jax.server.requests import (
    AssistantMessage,
    ChatRequest,
    Content,
    Message,
    SystemMessage,
    Tool,
    ToolMessage,
)

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that are not a client's to set by `chat_template_kwargs`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
      ids: of the prompt.
      thinking: whether it ends inside an open think block.
      tools: functions that may be called, in order.
    """

    ids: list[int]
    thinking: bool
    tools: tuple[Tool, ...]


def chat_prompt(model: Model, request: ChatRequest) -> ChatPrompt:
    """Returns the prompt that a request's conversation renders to.

    Raises:
      ApiError: 400; the template refuses the conversation or an option, or a message is off.
    """
    if model.template is None:
        raise bad_request("the model has no chat template; use /v1/completions")
    tools = tuple(request.tools or ()) if request.tool_choice != "none" else ()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    options = template_options(model, request)
    if tools:
        options["tools"] = [tool.model_dump(exclude_unset=True) for tool in tools]
    messages = [_as_template_takes_it(model, message) for message in ordered(request.messages)]
    try:
        ids = model.render(messages, **options)
    except ChatError as error:
        effort = request.reasoning_effort is not None and "effort" in str(error)
        raise bad_request(
            f"the model's chat template refuses the conversation: {error}",
            "reasoning_effort" if effort else "messages",
        ) from None
    tail = model.tokenizer.decode(ids[-16:], skip_special=False)
    return ChatPrompt(ids=ids, thinking=tail.rstrip().endswith(THINK), tools=tools)


def template_options(model: Model, request: ChatRequest) -> dict[str, Any]:
    """Returns the variables of the template that a request sets.

    Raises:
      ApiError: 400; the template knows no such variable.
    """
    assert model.template is not None
    source = model.template.source
    options = dict(request.chat_template_kwargs or {})
    for name in options:
        if name in RESERVED or not name.isidentifier() or name not in source:
            raise bad_request(
                f"chat_template_kwargs.{name} is no option of this model's chat template",
                f"chat_template_kwargs.{name}",
            )
    effort = request.reasoning_effort
    if effort is None:
        return options
    if effort == "none" and "enable_thinking" in source:
        return options | {"enable_thinking": False}
    if "reasoning_effort" not in source:
        raise bad_request(
            f"reasoning_effort={effort!r} is not supported: this model's chat template has no such "
            "option; leave it out, or switch thinking by chat_template_kwargs.enable_thinking",
            "reasoning_effort",
        )
    return options | {"reasoning_effort": effort}


def ordered(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the results of calls in the order of the calls.

    Templates show results without their ids, by order alone.

    Raises:
      ApiError: 400; a result belongs to no call before it.
    """
    done: list[Message] = []
    place: dict[str, int] = {}
    run: list[ToolMessage] = []
    for i, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            if message.tool_call_id not in place:
                raise bad_request(
                    f"{message.tool_call_id!r} is the id of no call in the assistant message "
                    "before it",
                    f"messages[{i}].tool_call_id",
                )
            run.append(message)
            continue
        done += sorted(run, key=lambda result: place[result.tool_call_id])
        run, place = [], {}
        done.append(message)
        if isinstance(message, AssistantMessage):
            place = {call.id: at for at, call in enumerate(message.tool_calls or ())}
    return done + sorted(run, key=lambda result: place[result.tool_call_id])


def text_of(content: Content | None) -> str:
    """Returns the text of a message's parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _as_template_takes_it(model: Model, message: Message) -> dict[str, Any]:
    """Returns a message as a template's variable."""
    assert model.template is not None
    role = message.role
    if isinstance(message, SystemMessage) and "developer" not in model.template.source:
        role = "system"
    rendered: dict[str, Any] = {"role": role, "content": text_of(message.content)}
    if not isinstance(message, AssistantMessage):
        return rendered
    if message.reasoning_content is not None:
        rendered["reasoning_content"] = message.reasoning_content
    calls, texts = [], [rendered["content"]] if rendered["content"] else []
    for call in message.tool_calls or ():
        arguments, text = written(call.function.name, call.function.arguments)
        if arguments is None:
            texts.append(text)
            continue
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    rendered["content"] = "\n\n".join(texts)
    if calls:
        rendered["tool_calls"] = calls
    return rendered
