"""An agent that answers questions about files: it calls a tool until the model has its answer.

Start `openjet-jax serve tiny`, then `python docs/examples/agent.py "Read the file notes.txt"`.
"""

import json
import pathlib
import sys

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Return the text of a file in the current directory.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
MAX_STEPS = 8


def read_file(path: str) -> str:
    """Returns a file's text, or what is wrong, for the model to read."""
    here, file = pathlib.Path.cwd(), pathlib.Path(path).resolve()
    if not file.is_relative_to(here):
        return f"error: {path} is outside the current directory"
    try:
        return file.read_text(encoding="utf-8")[:20_000]
    except (OSError, ValueError) as error:
        return f"error: {error}"


def result_of(call) -> str:
    """Returns what a call gives; a call that is off gets an error, and the talk goes on."""
    try:
        arguments = json.loads(call.function.arguments)
        if call.function.name != "read_file":
            return f"error: there is no tool {call.function.name}"
        return read_file(**arguments)
    except (TypeError, ValueError) as error:
        return f"error: {error}"


def run(client: openai.OpenAI, question: str) -> str:
    """Returns the model's answer to a question."""
    model = client.models.list().data[0].id
    messages: list = [{"role": "user", "content": question}]
    for _ in range(MAX_STEPS):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[TOOL],  # pyright: ignore[reportArgumentType]
            temperature=0,
            max_tokens=512,
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            print(f"[{call.function.name} {call.function.arguments}]", file=sys.stderr)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call)})
    return f"no answer after {MAX_STEPS} steps"


if __name__ == "__main__":
    with openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused") as client:
        print(run(client, " ".join(sys.argv[1:]) or "Read the file README.md"))
