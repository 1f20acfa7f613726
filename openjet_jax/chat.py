"""Conversations to prompts, by the chat template that a model's file brings along.

The template is run as it is; nothing about any model's turns is known here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from openjet_jax.control_guard import ControlGuard, strings_of
from openjet_jax.template_sandbox import TemplateEnvironment, limited
from openjet_jax.tokenizer import Tokenizer, cut

MAX_TEMPLATE_LEN = 1 << 20
"""Longest template, in characters; published ones have fewer than 20,000."""

_MAX_NESTING = 100
"""Deepest nesting of lists and mappings in a conversation."""

_environment = TemplateEnvironment()


class ChatError(ValueError):
    """A conversation that its template does not take, or a template that cannot be run."""


class ChatTemplate:
    """A model's jinja2 template for conversations, run in a sandbox with bounded work.

    Attributes:
      source: the template's text.
      literals: every text written in the template.
    """

    source: str
    literals: frozenset[str]

    def __init__(self, source: str):
        """Compiles a template.

        Raises:
          ChatError: it is too long or not a jinja2 template.
        """
        if not isinstance(source, str):
            raise ChatError(f"the chat template is a {type(source).__name__}, not text")
        if len(source) > MAX_TEMPLATE_LEN:
            raise ChatError(
                f"the chat template has {len(source)} characters; {MAX_TEMPLATE_LEN} is the limit"
            )
        self.source = source
        try:
            with limited():
                tree = _environment.read(source)
                self.literals = frozenset(
                    text
                    for kind, field in ((nodes.Const, "value"), (nodes.TemplateData, "data"))
                    for node in tree.find_all(kind)
                    if isinstance(text := getattr(node, field), str)
                )
                self._template = _environment.from_string(tree)  # type: ignore[arg-type]
        except Exception as error:
            raise ChatError(f"the chat template cannot be read: {_reason(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """Returns the prompt of a conversation.

        Args:
          messages: the turns, each with a `role` and what else the template reads (`content`,
            `reasoning_content`, `tool_calls`): strings, numbers, booleans, None, lists, mappings.
          tools: descriptions of the functions that may be called.
          add_generation_prompt: whether the prompt ends where the model's turn begins.
          **options: the template's own variables, such as `enable_thinking`, `preserve_thinking` or
            `reasoning_effort`.

        Raises:
          ChatError: the conversation is malformed or the template refuses it, in its own words.
        """
        return self._render(_variables(messages, tools, add_generation_prompt, options))

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            with limited():
                return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatError(_reason(error)) from error
        except Exception as error:
            raise ChatError(f"the chat template failed: {_reason(error)}") from error


def render_ids(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
) -> list[int]:
    """Returns the ids of a conversation's prompt: the text of `ChatTemplate.render`, encoded.

    Control tokens are read only where the template wrote them; spelled in a message, a tool or an
    option they are plain text. `control_guard` says how the two are told apart: the conversation
    is rendered once as it is and once guarded. With the stand-ins turned back both texts must be
    equal. They are not if the template looks at guard characters in messages; then only what
    spells a control token, or part of one at a string's end, is guarded, the texts must be equal,
    and the control tokens found must be those of the fully guarded rendering.

    Args:
      tokenizer: the model's tokenizer.
      template: the model's template.
      messages: as in `ChatTemplate.render`, likewise the others.
      tools: see there.
      add_generation_prompt: see there.
      **options: see there.

    Raises:
      ChatError: as `ChatTemplate.render`; or the template acts on control tokens in messages, so
        that neither guarded rendering will do.
      ValueError: a string has a lone surrogate.
    """
    variables = _variables(messages, tools, add_generation_prompt, options)
    plain = template._render(variables)
    strings = list(strings_of(variables))
    guard = ControlGuard(tokenizer.control_tokens, template.literals, strings)
    if not any(map(guard.concerns, strings)):
        return tokenizer.encode(plain, special=True)

    text = _guarded(template, variables, plain, guard, tokenizer.control_tokens)
    ids: list[int] = []
    for piece in cut(text, tokenizer.control_tokens):
        ids += [piece] if isinstance(piece, int) else tokenizer.encode(guard.reveal(piece))
    return ids


def _guarded(
    template: ChatTemplate,
    variables: Mapping[str, Any],
    plain: str,
    guard: ControlGuard,
    control: Mapping[str, int],
) -> str:
    """The plain rendering with stand-ins for guard characters that come from the conversation."""
    try:
        full = template._render(_copy(variables, guard.hide_all))
    except ChatError:
        full = None
    if full is not None and guard.reveal(full) == plain:
        return full
    text = template._render(_copy(variables, guard.hide_spelled))
    same = full is not None and _found(text, control) == _found(full, control)
    if not same or guard.reveal(text) != plain:
        raise ChatError(
            "the chat template acts on text that belongs to control tokens, so its own cannot be "
            f"told from a message's; take {' and '.join(guard.guards)} out of the messages"
        )
    return text


def _found(text: str, control: Mapping[str, int]) -> list[int]:
    return [piece for piece in cut(text, control) if isinstance(piece, int)]


def _variables(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """A checked copy of what a template is given."""
    if not isinstance(messages, list | tuple):
        raise ChatError(f"messages is a {type(messages).__name__}; it must be a list of mappings")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(
                f"message {i} is {message!r:.80}; it must be a mapping with a 'role', such as "
                "{'role': 'user', 'content': 'Hello'}"
            )
    if tools is not None and not (
        isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise ChatError(f"tools is {tools!r:.80}; it must be a list of mappings or None")
    given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
    return _copy({**given, **options}, str)


def _copy(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """`value` with `change` applied to every string in it, keys included."""
    if depth > _MAX_NESTING:
        raise ChatError(f"the conversation is nested more than {_MAX_NESTING} levels deep")
    if isinstance(value, str):
        return change(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_copy(item, change, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {change(key): _copy(item, change, depth + 1) for key, item in value.items()}
    raise ChatError(
        f"{value!r:.80} in the conversation is a {type(value).__name__}; use strings, numbers, "
        "booleans, None, lists and mappings with string keys"
    )


def _reason(error: Exception) -> str:
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return (str(error) or type(error).__name__) + line
