"""The server's own description, made from the models that read requests."""

from typing import Any

from pydantic.json_schema import models_json_schema

import openjet_jax
from openjet_jax.server.requests import ChatRequest, CompletionRequest

_ERROR = {
    "description": "An error in OpenAI's form",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
_STATUSES = (400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 503)
_ERRORS = {str(status): _ERROR for status in _STATUSES}


def description(model: str) -> dict[str, Any]:
    """Returns the OpenAPI document of a server of `model`."""
    kinds = (ChatRequest, CompletionRequest)
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    for kind in kinds:
        schemas["$defs"][kind.__name__]["properties"]["model"]["enum"] = [model]
    paths = {
        "/v1/chat/completions": {"post": _generation("Answers a conversation", "ChatRequest")},
        "/v1/completions": {"post": _generation("Continues a text", "CompletionRequest")},
        "/v1/models": {"get": _reading("The model that is served")},
        "/health": {"get": _reading("Whether the server is up")},
        "/metrics": {"get": _reading("Counters for Prometheus", {"text/plain": {}})},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "openjet-jax", "version": openjet_jax.__version__},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _generation(text: str, schema: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    return {
        "summary": text,
        "requestBody": {"required": True, "content": body},
        "responses": {
            "200": {
                "description": "Whole, or events if `stream`",
                # OpenAPI 3.1 has no form for a stream of events: the data of each is a chunk.
                "content": _OBJECT | {"text/event-stream": {}},
            },
            **_ERRORS,
        },
    }


def _reading(text: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "summary": text,
        "responses": {"200": {"description": text, "content": content or _OBJECT}, **_ERRORS},
    }
