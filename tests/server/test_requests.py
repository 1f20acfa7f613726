"""Any JSON is read or refused by name; prompts and grammars follow from what was read."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import openjet_jax as oj
from openjet_jax.server.errors import ApiError
from openjet_jax.server.grammar import GrammarConstraint, GrammarVocabulary, grammar_of
from openjet_jax.server.messages import ChatPrompt, chat_prompt, ordered
from openjet_jax.server.openapi import description
from openjet_jax.server.requests import ChatRequest, CompletionRequest, read_request
from openjet_jax.server.samplings import samplings_of

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "unknown"})
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "function", "name", "a", "1"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def read(**fields) -> ChatRequest:
    return read_request(json.dumps(CHAT | fields).encode(), ChatRequest)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, max_size=3), st.booleans())
def test_any_json_is_read_or_refused(model, fields, chat):
    kind, base = (ChatRequest, CHAT) if chat else (CompletionRequest, {"model": "a", "prompt": "b"})
    try:
        request = read_request(json.dumps(base | fields).encode(), kind)
        samplings_of(model, request)
        if isinstance(request, ChatRequest):
            grammar_of(request, chat_prompt(model, request))
    except ApiError as error:
        assert error.status == 400 and error.message
    else:
        assert "unknown" not in fields


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(body):
    with pytest.raises(ApiError) as refusal:
        read_request(body, ChatRequest)
    assert refusal.value.status == 400


def test_every_field_of_the_models_is_described():
    document = description("tiny")
    schemas = document["components"]["schemas"]
    for kind in (ChatRequest, CompletionRequest):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.model_fields)
        assert schemas[kind.__name__]["additionalProperties"] is False
        assert schemas[kind.__name__]["properties"]["model"]["enum"] == ["tiny"]


def test_what_a_request_leaves_out_the_file_says(model):
    sampling = samplings_of(model, read())[0]
    assert (sampling.temperature, sampling.top_k) == (pytest.approx(0.7), 20)
    chosen = samplings_of(model, read(temperature=0, top_k=5, seed=2**64 - 1, n=2))
    assert [s.seed for s in chosen] == [2**64 - 1, 0]
    assert all((s.temperature, s.top_k) == (0, 5) for s in chosen)
    assert samplings_of(model, read())[0].seed != samplings_of(model, read())[0].seed


def test_results_of_calls_are_put_in_the_order_of_the_calls():
    def call(name):
        return {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def result(name):
        return {"role": "tool", "tool_call_id": name, "content": name}

    turns = [{"role": "assistant", "tool_calls": [call("a"), call("b")]}, result("b"), result("a")]
    messages = ordered(read(messages=[*CHAT["messages"], *turns, *CHAT["messages"]]).messages)
    assert [message.content for message in messages[2:]] == ["a", "b", "Hi"]


def test_thinking_is_seen_in_the_prompt(model):
    assert not chat_prompt(model, read()).thinking
    assert chat_prompt(model, read(chat_template_kwargs={"enable_thinking": True})).thinking
    assert not chat_prompt(model, read(reasoning_effort="none")).thinking


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "lines": {"type": "integer"},
                    "mode": {"enum": ["a", "b"]},
                    "where": {"$ref": "#/$defs/place"},
                },
                "required": ["path"],
                "$defs": {"place": {"type": "array", "items": {"type": "integer"}}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
READ = (
    "<tool_call>\n<function=read>\n<parameter=path>\nx\n</parameter>\n{}</function>\n</tool_call>"
)
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def vocabulary(model: oj.Model) -> GrammarVocabulary:
    return GrammarVocabulary(model.tokenizer)


def accepts(model, vocabulary, text: str, *, thinking=False, **fields) -> bool:
    """Whether every token of a reply is allowed, and then its end."""
    request = read(**fields)
    grammar = grammar_of(
        request, ChatPrompt(ids=[], thinking=thinking, tools=tuple(request.tools or ()))
    )
    assert grammar is not None
    vocabulary.check(*grammar)
    constraint = GrammarConstraint(vocabulary, grammar[0])
    for token in [*model.tokenizer.encode(text), model.tokenizer.stop_ids[0]]:
        if not constraint.masks([])[0, token // 32] >> (token % 32) & 1:
            return False
        constraint.advance([token])
    return True


@pytest.mark.parametrize(
    "text, good",
    [
        ("Hello.", True),
        ("a <tool_cal b", True),
        (READ.format(""), True),
        (f"Well.\n\n{READ.format('')}\n{NOW}", True),
        (READ.format("<parameter=lines>\n12\n</parameter>\n"), True),
        (READ.format("<parameter=lines>\ntwelve\n</parameter>\n"), False),
        (READ.format("<parameter=mode>\nb\n</parameter>\n"), True),
        (READ.format("<parameter=mode>\nc\n</parameter>\n"), False),
        (READ.format("<parameter=where>\n[1, 2]\n</parameter>\n"), True),
        (READ.format("<parameter=other>\n1\n</parameter>\n"), False),
        ("<tool_call>\n<function=other>\n</function>\n</tool_call>", False),
        ("<tool_call>oops", False),
    ],
)
def test_strict_tools_hold_calls_to_their_schema(model, vocabulary, text, good):
    assert accepts(model, vocabulary, text, tools=TOOLS) == good


def test_a_demanded_call_comes_first_and_one_means_one(model, vocabulary):
    required = {"tools": TOOLS, "tool_choice": "required"}
    assert not accepts(model, vocabulary, "Hello.", **required)
    assert accepts(model, vocabulary, f"{NOW}\n{NOW}", **required)
    assert not accepts(model, vocabulary, f"{NOW}\n{NOW}", **required, parallel_tool_calls=False)
    named = {"type": "function", "function": {"name": "now"}}
    assert accepts(model, vocabulary, NOW, tools=TOOLS, tool_choice=named)
    assert not accepts(model, vocabulary, READ.format(""), tools=TOOLS, tool_choice=named)


def test_the_think_block_before_a_held_answer_is_free(model, vocabulary):
    wanted: dict[str, Any] = {"response_format": {"type": "json_object"}}
    text = 'so, {"a"?\n</think>\n\n{"a": 1}'
    assert accepts(model, vocabulary, text, thinking=True, **wanted)
    assert not accepts(model, vocabulary, text, **wanted)
    assert not accepts(model, vocabulary, "x\n</think>\n\nHello.", thinking=True, **wanted)


@pytest.mark.parametrize(
    "schema", [{"type": "nonsense"}, {"uniqueItems": True, "type": "array"}, {"$ref": "http://a/b"}]
)
def test_a_schema_that_no_mask_can_hold_is_refused(model, vocabulary, schema):
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with pytest.raises(ApiError) as refusal:
        accepts(model, vocabulary, "1", response_format=wanted)
    assert refusal.value.param == "response_format"


def test_masks_after_drafts_are_those_of_the_longer_text(model, vocabulary):
    grammar = 'start: %json {"type": "array", "items": {"type": "integer"}}'
    tokens = model.tokenizer.encode("[1, 22]")
    ahead = GrammarConstraint(vocabulary, grammar).masks(tokens[:3])
    step = GrammarConstraint(vocabulary, grammar)
    for row in range(4):
        assert (step.masks([])[0] == ahead[row]).all()
        step.advance(tokens[row : row + 1])
