"""Replies are read alike however they are cut, and what is no call stays text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openjet_jax.server.arguments import read_arguments
from openjet_jax.server.parsing import Call, ReplyParser, Text

TOOLS = ("read_file", "add")


def call_text(name, **parameters):
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in parameters.items()]
    return "\n".join(["<tool_call>", f"<function={name}>", *lines, "</function>", "</tool_call>"])


ONE = call_text("read_file", path="a.txt")
TWO = call_text("add", a="1", b="[2]")
READ = Call("read_file", (("path", "a.txt"),))
ADD = Call("add", (("a", "1"), ("b", "[2]")))


def parse(pieces, *, thinking=False, tools=TOOLS):
    parser = ReplyParser(thinking=thinking, tools=tools)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    joined = []
    for event in events:
        if joined and isinstance(event, Text) and isinstance(joined[-1], Text):
            if joined[-1].channel == event.channel:
                joined[-1] = Text(event.channel, joined[-1].text + event.text)
                continue
        joined.append(event)
    return joined


def content(text):
    return Text("content", text)


def reasoning(text):
    return Text("reasoning", text)


CASES = {
    "content alone": ("Hello\n", False, [content("Hello\n")]),
    "reasoning, then content": (
        "because\n</think>\n\nHi",
        True,
        [reasoning("because"), content("Hi")],
    ),
    "reasoning that never ends": ("because ", True, [reasoning("because")]),
    "a think block that the prompt did not open": (
        "\n<think>\nso\n</think>\n\nHi",
        False,
        [reasoning("so"), content("Hi")],
    ),
    "a think tag in the middle of content": ("a <think> b", False, [content("a <think> b")]),
    "content, then two calls": (
        f"Well:\n\n{ONE}\n{TWO}\n",
        False,
        [content("Well:"), READ, ADD],
    ),
    "text after a call": (f"{ONE}\nand so on", False, [READ, content("and so on")]),
    "a call inside the think block": (
        f"I read it.\n{ONE}\nThen?\n</think>\n\nDone",
        True,
        [reasoning("I read it."), READ, reasoning("Then?"), content("Done")],
    ),
    "a call in reasoning of a tool that was not offered": (
        "<tool_call>\n<function=other>\n</function>\n</tool_call>\n</think>\n\nx",
        True,
        [
            reasoning("<tool_call>\n<function=other>\n</function>\n</tool_call>"),
            content("x"),
        ],
    ),
    "the tag in prose": (
        "write <tool_call> first\n</think>\n\nok",
        True,
        [reasoning("write <tool_call> first"), content("ok")],
    ),
    "a call that breaks off": (ONE[:-20], False, [content(ONE[:-20])]),
    "JSON in a call": (
        '<tool_call>\n{"name": "add"}\n</tool_call>',
        False,
        [content('<tool_call>\n{"name": "add"}\n</tool_call>')],
    ),
    "a broken call before a whole one": (
        f"<tool_call>oops</tool_call>\n{ONE}",
        False,
        [content("<tool_call>oops</tool_call>"), READ],
    ),
    "no parameters": (
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        False,
        [Call("add", ())],
    ),
    "a value with tags in it": (
        "<tool_call><function=add><parameter=a>\nx </parameter> y\n</function> z\n</parameter>"
        "</function></tool_call>",
        False,
        [Call("add", (("a", "x </parameter> y\n</function> z"),))],
    ),
    "a value without its end": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        False,
        [Call("add", (("a", "1"),))],
    ),
    "a function without its end": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        False,
        [Call("add", (("a", "1"),))],
    ),
    "empty lines of a value": (
        call_text("add", a="\n 1\n"),
        False,
        [Call("add", (("a", "\n 1\n"),))],
    ),
    "what the bundled model wrote, asked for a file": (
        "<tool_call>\n<function=read_file>\n<parameter=path>\ndiffwin.py\n</parameter>\n"
        "</function>\n</tool_call>",
        False,
        [Call("read_file", (("path", "diffwin.py"),))],
    ),
    "what it wrote, given the result": (
        "The file diffwin.py begins as follows:\n```python\nerror: [Errno 2] No such file\n```",
        False,
        [
            content(
                "The file diffwin.py begins as follows:\n"
                "```python\nerror: [Errno 2] No such file\n```"
            )
        ],
    ),
    "characters of several bytes": (
        f"日本語 \U0001f680\n{ONE.replace('a.txt', 'é\U0001f680.txt')}",
        False,
        [content("日本語 \U0001f680"), Call("read_file", (("path", "é\U0001f680.txt"),))],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_split_into_reasoning_content_and_calls(case):
    text, thinking, expected = CASES[case]
    assert parse([text], thinking=thinking) == expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_a_reply_is_read_alike_at_every_chunk_width(case, width):
    text, thinking, expected = CASES[case]
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    assert parse(pieces, thinking=thinking) == expected


@pytest.mark.parametrize("case", CASES)
def test_a_reply_is_read_alike_at_every_single_cut(case):
    text, thinking, expected = CASES[case]
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], thinking=thinking) == expected


FRAGMENTS = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "<function=x", ">"]
    + ["</function>", "<parameter=a>", "<parameter=", "</parameter>", "\n", " ", "<", "ab", "é"]
    + [ONE, TWO]
)


@settings(max_examples=600, deadline=None)
@given(
    fragments=st.lists(FRAGMENTS, max_size=14),
    thinking=st.booleans(),
    tools=st.sampled_from([(), TOOLS]),
    data=st.data(),
)
def test_any_cuts_of_any_text_give_the_same_events(fragments, thinking, tools, data):
    text = "".join(fragments)
    whole = parse([text], thinking=thinking, tools=tools)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces, thinking=thinking, tools=tools) == whole
    assert parse(list(text), thinking=thinking, tools=tools) == whole


@settings(max_examples=200, deadline=None)
@given(st.lists(FRAGMENTS, max_size=14), st.booleans())
def test_without_tools_every_character_but_tags_and_space_comes_out(fragments, thinking):
    text = "".join(fragments)
    events = parse([text], thinking=thinking, tools=())
    tags = [event for event in events if isinstance(event, Call)]
    out = "".join(event.text for event in events if isinstance(event, Text))
    assert not tags
    kept = "".join(text.split())
    for tag in ("</think>", "<think>"):
        if "".join(out.split()) != kept:
            kept = kept.replace(tag, "", 1)
    assert "".join(out.split()) == kept


SCHEMAS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "maybe": {"type": ["string", "null"]},
    "mode": {"enum": ["1", "2"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
}


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("text", "12", "12"),
        ("text", '"quoted"', '"quoted"'),
        ("count", "12", 12),
        ("count", "twelve", "twelve"),
        ("count", "NaN", "NaN"),
        ("count", "1e999", "1e999"),
        ("undeclared", '"\\ud800"', '"\\ud800"'),
        ("flag", "true", True),
        ("flag", "True", "True"),
        ("list", '[1, "a"]', [1, "a"]),
        ("list", "[1,", "[1,"),
        ("maybe", "null", None),
        ("maybe", "nothing", "nothing"),
        ("maybe", "12", "12"),
        ("mode", "1", "1"),
        ("either", "7", 7),
        ("undeclared", '{"a": 1}', {"a": 1}),
        ("undeclared", "plain", "plain"),
    ],
)
def test_arguments_are_typed_by_the_schema_and_always_json(name, text, value):
    arguments = read_arguments(Call("f", ((name, text),)), SCHEMAS)
    assert arguments == {name: value} and type(arguments[name]) is type(value)
    json.dumps(arguments, allow_nan=False)


def test_a_deeply_nested_argument_is_text():
    text = "[" * 100_000
    assert read_arguments(Call("f", (("list", text),)), SCHEMAS) == {"list": text}
