#!/bin/sh
# Requests for a server on this machine: openjet-jax serve tiny
set -eu
at=http://127.0.0.1:8000/v1

post() { curl -sS -N "$at/$1" -H 'Content-Type: application/json' -d "$2"; echo; }

curl -sS "$at/models"; echo

post completions '{"model": "openjet-tiny-code", "max_tokens": 48, "temperature": 0,
  "prompt": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n"}'

post chat/completions '{"model": "openjet-tiny-code", "stream": true, "max_tokens": 64,
  "stream_options": {"include_usage": true},
  "messages": [{"role": "user", "content": "Write a Python function `area(w, h)`."}]}'

post chat/completions '{"model": "openjet-tiny-code", "max_tokens": 128,
  "messages": [{"role": "user", "content": "Describe a pet."}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": {
    "type": "object", "required": ["name", "legs"], "additionalProperties": false,
    "properties": {"name": {"type": "string"}, "legs": {"type": "integer"}}}}}}'

post chat/completions '{"model": "openjet-tiny-code", "max_tokens": 128, "tool_choice": "required",
  "messages": [{"role": "user", "content": "Read the file notes.txt"}],
  "tools": [{"type": "function", "function": {"name": "read_file", "parameters": {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}]}'
