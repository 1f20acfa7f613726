"""The real `openai` client against a server with the bundled model."""

import importlib.util
import json
import math
import pathlib

import openai
import pytest

ASK = [{"role": "user", "content": "Write a Python function `read_lines(path)`."}]
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Return the text of a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
            "required": ["path", "lines"],
        },
    },
}


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client:
        yield client


def chat(client, messages=ASK, **settings):
    settings = {"temperature": 0, "max_tokens": 24} | settings
    return client.chat.completions.create(model="tiny", messages=messages, **settings)


def test_models_lists_the_model(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_answers_and_counts_tokens(client):
    answer = chat(client)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("```python\ndef read_lines(path):")
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


def test_a_stream_joins_to_the_whole_answer(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_second_turn_reads_its_new_tokens_alone(client):
    first = chat(client, stop=["lines ="])
    message = first.choices[0].message
    more = [
        *ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Again."},
    ]
    second = chat(client, more)
    known = first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= known
    assert second.usage.prompt_tokens > known


def test_logprobs_stand_beside_every_token(client):
    answer = chat(client, logprobs=True, max_tokens=6)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6 and all(entry.logprob <= 0 for entry in entries)
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_stand_beside_the_chosen_one(client, stream):
    answer = chat(client, logprobs=True, top_logprobs=3, max_tokens=6, stream=stream)
    chunks = list(answer) if stream else [answer]
    scored = [chunk.choices[0].logprobs for chunk in chunks]
    entries = [entry for logprobs in scored if logprobs for entry in logprobs.content]
    assert len(entries) == 6
    for entry in entries:
        tops = entry.top_logprobs
        assert len(tops) == 3 and tops[0].token == entry.token
        assert tops[0].logprob == entry.logprob >= tops[1].logprob >= tops[2].logprob
        assert sum(math.exp(top.logprob) for top in tops) <= 1 + 1e-5


def test_a_completion_lists_the_likeliest_tokens_and_the_chosen_one(client):
    settings = {"model": "tiny", "prompt": "def f(", "max_tokens": 5, "temperature": 0}
    found = client.completions.create(**settings, logprobs=2).choices[0].logprobs
    assert len(found.top_logprobs) == 5
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert len(top) == 2 and top[token] == logprob == max(top.values())


def test_a_seed_repeats_and_n_answers_differ(client):
    settings = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 12}
    first, second = chat(client, **settings), chat(client, **settings)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) > 1
    alone = chat(client, temperature=1.0, seed=8, max_tokens=12)
    assert alone.choices[0].message.content == texts[1]


def test_a_stop_string_ends_the_text_before_it(client):
    answer = chat(client, stop=["read_"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "```python\ndef "


def test_the_model_calls_a_tool_and_reads_its_result(client):
    ask = [{"role": "user", "content": "Read the file notes.txt"}]
    answer = chat(client, ask, tools=[READ_FILE], max_tokens=64)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    call = choice.message.tool_calls[0]
    assert call.function.name == "read_file" and "path" in json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Buy milk."}
    after = chat(client, [*ask, choice.message, result], tools=[READ_FILE], max_tokens=8)
    assert after.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens


def test_the_example_agent_calls_its_tool_and_ends_with_an_answer(client, tmp_path, monkeypatch):
    path = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "agent.py"
    spec = importlib.util.spec_from_file_location("agent", path)
    assert spec is not None and spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("Buy milk.")
    results = []
    result_of = agent.result_of
    monkeypatch.setattr(agent, "result_of", lambda c: results.append(result_of(c)) or results[-1])
    answer = agent.run(client, "Read the file notes.txt")
    assert results and answer and not answer.startswith("no answer")
    assert agent.read_file("notes.txt") == "Buy milk."
    assert agent.read_file("../x").startswith("error") and agent.read_file("y").startswith("error")


def test_a_demanded_call_follows_its_schema(client):
    settings = {"tools": [READ_FILE], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(chat(client, max_tokens=200, stream=True, **settings))
    calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert len(calls) == 1 and chunks[-1].choices[0].finish_reason == "tool_calls"
    arguments = json.loads(calls[0].function.arguments)
    assert isinstance(arguments["path"], str) and isinstance(arguments["lines"], int)


def test_json_follows_its_schema(client):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}}
    answer = chat(client, response_format=wanted, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    pet = json.loads(answer.choices[0].message.content)
    assert list(pet) == ["name", "age", "kind"] and pet["kind"] in ("cat", "dog")
    assert len(pet["name"]) <= 12 and 0 <= pet["age"] <= 150


def test_reasoning_comes_apart_from_content(client):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat(client, extra_body=thinking, max_tokens=200)
    message = answer.choices[0].message
    assert message.model_extra["reasoning_content"]
    assert "</think>" not in message.model_extra["reasoning_content"] + (message.content or "")


def test_a_text_is_completed(client):
    settings = {"model": "tiny", "prompt": "def fibonacci(n):\n", "temperature": 0}
    whole = client.completions.create(**settings, max_tokens=12, logprobs=0)
    assert whole.choices[0].text.strip() and len(whole.choices[0].logprobs.tokens) == 12
    chunks = client.completions.create(**settings, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


@pytest.mark.parametrize(
    "settings, param",
    [
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"n": 9}, "n"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"extra_body": {"chat_template_kwargs": {"odd": 1}}},
            "chat_template_kwargs.odd",
        ),
        ({"max_completion_tokens": 5}, "max_tokens"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(client, settings, param):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, **settings)
    assert refusal.value.param == param


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")
