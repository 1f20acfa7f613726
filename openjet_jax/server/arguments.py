"""Arguments of tool calls: between the text a model writes and JSON, by the tool's own schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openjet_jax.server.parsing import CALL, END_CALL, Call

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "number": (int, float),
    "integer": (int,),
}


def parameter_schemas(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the schemas of a function's parameters by name, without checking them."""
    properties = (parameters or {}).get("properties")
    return dict(properties) if isinstance(properties, Mapping) else {}


def read_arguments(call: Call, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's arguments as JSON values.

    Strings are taken as they are, other values read as JSON. A value that is not of its declared
    type, and a parameter that was not declared, come as what they are, in the end as a string: the
    caller's own check of the arguments can then tell the model what was wrong with this call.

    Args:
      call: as parsed; of a parameter that stands twice the last value counts.
      schemas: by parameter.
    """
    return {name: _value(text, schemas.get(name)) for name, text in call.parameters}


def _value(text: str, schema: Any) -> Any:
    if is_raw(schema):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # Numbers that overflow and lone surrogates can be read but not written.
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    types = _types(schema)
    if types and not any(_is_a(value, name) for name in types) and "string" in types:
        return text
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    return isinstance(value, _JSON_TYPES.get(name, ()))


def _types(schema: Any) -> list[str]:
    """Returns the types a schema names at its top, none if it names none."""
    if not isinstance(schema, Mapping):
        return []
    named = schema.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, Sequence):
        return [name for name in named if isinstance(name, str)]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, Sequence):
            return [name for option in options for name in _types(option)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list):
        return [name for name in _JSON_TYPES if any(_is_a(value, name) for value in values)]
    return []


def is_raw(schema: Any) -> bool:
    """Returns whether values of a schema are strings alone, which are written without quotes."""
    return _types(schema) == ["string"]


def written(name: str, arguments: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the arguments of an earlier call as a template takes them, or the call as text.

    A client sends back what a model once wrote. Arguments that are no JSON object must not end
    the conversation: such a call is shown to the model as text, as it stood.

    Args:
      name: of the function.
      arguments: JSON, as the client sent it.

    Returns:
      The arguments and "", or None and the text.
    """
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value, ""
    return None, f"{CALL}\n<function={name}>\n{arguments}\n</function>\n{END_CALL}"
