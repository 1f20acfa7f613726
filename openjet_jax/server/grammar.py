"""Grammars that hold a reply to a JSON schema or to well-formed tool calls, by llguidance.

A grammar covers the whole reply: the think block, if the prompt opened one, then either JSON or
text and calls in the model's own format. The masks are exact: a token is allowed if and only if the
text so far with it can still become a reply. Arguments come in the order of the schema's
properties.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from jaxtyping import UInt32

from openjet_jax.config import ROWS
from openjet_jax.sampling import mask_words
from openjet_jax.server.arguments import is_raw
from openjet_jax.server.errors import bad_request
from openjet_jax.server.messages import ChatPrompt
from openjet_jax.server.parsing import CALL, END_CALL, END_THINK
from openjet_jax.server.requests import (
    ChatRequest,
    Function,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
)
from openjet_jax.tokenizer import Tokenizer

# White space in JSON is free but bounded: a model could otherwise write it for ever.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A]{0,32}"}

_MAX_FORCED_CALLS = 16


class GrammarVocabulary:
    """A model's tokens as llguidance sees them; made once, since it indexes all of them."""

    def __init__(self, tokenizer: Tokenizer):
        """Indexes the tokens; those of control can only be chosen to end a reply."""
        self.stop_ids = frozenset(tokenizer.stop_ids)
        self.vocab_size = tokenizer.vocab_size
        self.index = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(tokenizer)),
            n_vocab=tokenizer.vocab_size,
            eos_token=list(tokenizer.stop_ids),
        )

    def check(self, grammar: str, param: str) -> None:
        """Compiles a grammar.

        Raises:
          ApiError: 400; the schema is not sound or says something that no mask can hold.
        """
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self.index)
        if failed:
            raise bad_request(f"{param}: {_first_line(messages[0])}", param, "invalid_json_schema")


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        control = {token_id: text for text, token_id in tokenizer.control_tokens.items()}
        self.eos_token_id = tokenizer.stop_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(control)
        # The library's mark of a token that is not text.
        self.tokens = [
            b"\xff" + control[i].encode() if i in control else tokenizer.token_bytes(i)
            for i in range(tokenizer.vocab_used)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


class GrammarConstraint:
    """A `Constraint` that follows one reply through a grammar."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str):
        """Starts at the beginning of a reply; `grammar` was checked."""
        self._vocabulary = vocabulary
        self._matcher = llguidance.LLMatcher(vocabulary.index, grammar, log_level=0)

    def masks(self, drafts: Sequence[int]) -> UInt32[np.ndarray, "rows words"]:
        """Returns what may follow the reply so far, and it with each prefix of `drafts`."""
        words = mask_words(self._vocabulary.vocab_size)
        masks = np.full((ROWS, words), 0xFFFFFFFF, np.uint32)
        taken = 0
        for row in range(len(drafts) + 1):
            mask = masks[row]
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if row == len(drafts) or drafts[row] in self._vocabulary.stop_ids:
                break
            if not self._matcher.try_consume_tokens([drafts[row]]):
                break
            taken += 1
        if taken:
            self._matcher.rollback(taken)
        return masks

    def advance(self, token_ids: Sequence[int]) -> None:
        """Moves past tokens that were emitted.

        Raises:
          RuntimeError: the grammar does not know one, or grew beyond the library's limits.
        """
        ids = [token for token in token_ids if token not in self._vocabulary.stop_ids]
        if ids and not self._matcher.consume_tokens(ids):
            raise RuntimeError(f"the grammar failed: {_first_line(self._matcher.get_error())}")


def grammar_of(request: ChatRequest, prompt: ChatPrompt) -> tuple[str, str] | None:
    """Returns the grammar a chat request needs and the field it comes from, or None for none.

    Raises:
      ApiError: 400; fields contradict one another.
    """
    choice, tools = request.tool_choice, [tool.function for tool in prompt.tools]
    if isinstance(choice, NamedTool):
        tools = [function for function in tools if function.name == choice.function.name]
    if isinstance(choice, NamedTool | str) and choice not in ("none", "auto") and not tools:
        raise bad_request("tool_choice names no function of tools", "tool_choice")
    forced = isinstance(choice, NamedTool) or choice == "required"
    single = request.parallel_tool_calls is False or isinstance(choice, NamedTool)
    body = _json_body(request)
    if body is not None and forced:
        raise bad_request(
            "response_format contradicts a tool_choice that demands a call", "response_format"
        )
    strict = any(function.strict for function in tools)
    if body is None and not (tools and (forced or single or strict)):
        return None
    rules = _call_rules(tools, single=single) if tools else []
    if body is not None:
        answer = "json | opening calls" if tools else "json"
        rules.append(f"json: %json {body}")
    else:
        answer = "opening calls" if forced else "text | lead calls"
        # Text before a call ends with the call's own tag; text alone must not hold it.
        rules.append(f"lead[lazy]: {_upto(CALL)}")
        rules.append(f"text: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*){_regex(CALL)}(?s:.*)/")
    if prompt.thinking:
        rules.append(f'start: think "\\n\\n" answer\nthink[lazy]: {_upto(END_THINK)}')
    else:
        rules.append("start: answer")
    rules.append(f"answer: {answer}")
    return "\n".join(rules), "response_format" if body is not None else "tools"


def _json_body(request: ChatRequest) -> str | None:
    """Returns the schema of a JSON answer, or None if the answer is text."""
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        return _schema({"type": "object"})
    if isinstance(wanted, JsonSchemaFormat):
        return _schema(wanted.json_schema.schema_)
    return None


def _call_rules(functions: Sequence[Function], *, single: bool) -> list[str]:
    """Returns the rules of calls of any of some functions, from behind the first opening tag on."""
    names = " | ".join(f"call{i}" for i in range(len(functions)))
    more = "" if single else f' ("\\n" opening call){{0,{_MAX_FORCED_CALLS - 1}}}'
    rules = [
        f"opening: {_text(CALL)}",
        f'call: "\\n" ({names}) {_text(f"</function>{chr(10)}{END_CALL}")}',
        f"calls: call{more}",
        f"value[lazy]: {_upto(chr(10) + '</parameter>' + chr(10))}",
    ]
    for i, function in enumerate(functions):
        schema = function.parameters or {}
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise bad_request(
                f"the parameters of {function.name} must be a JSON schema of an object", "tools"
            )
        parts = [_text(f"<function={function.name}>\n")]
        for j, (name, value) in enumerate(properties.items()):
            if not name or any(c in "<>\n" for c in name):
                raise bad_request(
                    f"parameter {name!r} of {function.name} cannot be written in a call: its name "
                    "must not be empty or hold <, > or a line break",
                    "tools",
                )
            parts.append(f"call{i}_{j}" + ("" if name in required else "?"))
            rules.append(
                f"call{i}_{j}: {_text(f'<parameter={name}>{chr(10)}')} {_value(value, schema)}"
            )
        rules.append(f"call{i}: {' '.join(parts)}")
    return rules


def _value(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns the rule of a parameter's value and what closes it."""
    close = "\n</parameter>\n"
    if not is_raw(schema):
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        whole = {**definitions, **schema} if isinstance(schema, Mapping) else {}
        return f"%json {_schema(whole)} {_text(close)}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is None:
        return "value"
    return "(" + " | ".join(_text(choice + close) for choice in choices) + ")"


def _upto(end: str) -> str:
    return f"/(?s:.*){_regex(end)}/"


def _regex(text: str) -> str:
    return text.replace("/", "\\/").replace("\n", "\\n")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _first_line(text: str) -> str:
    return " ".join(text.split("\n   1 |")[0].split())
