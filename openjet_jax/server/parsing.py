"""A model's reply as it streams: reasoning, content and tool calls, whatever the chunks.

The templates of this family let a model write

    reasoning</think>

    content

    <tool_call>
    <function=NAME>
    <parameter=P>
    VALUE
    </parameter>
    </function>
    </tool_call>

where the prompt has opened the think block. Nothing is decided before the characters that decide it
are there, so the events joined do not depend on how the text was cut. What is no whole call is text
and stays where it stood; a call inside the think block counts if it names a tool that was offered.
"""

import dataclasses
from collections.abc import Collection, Iterator
from typing import Literal

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"

MAX_NAME_LEN = 256
"""Longest name of a function or parameter; a longer one is text."""

Channel = Literal["reasoning", "content"]


@dataclasses.dataclass(frozen=True)
class Text:
    """Characters of one channel."""

    channel: Channel
    text: str


@dataclasses.dataclass(frozen=True)
class Call:
    """A whole tool call: the function's name, and parameters with their values as written."""

    name: str
    parameters: tuple[tuple[str, str], ...]


type Event = Text | Call


class ReplyParser:
    """Reads a reply piece by piece.

    White space around the think block and around calls is dropped; all else comes out once.
    """

    def __init__(self, *, thinking: bool, tools: Collection[str] = ()):
        """Starts an empty reply.

        Args:
          thinking: whether the prompt ends inside an open think block.
          tools: names of the functions that were offered; without any, calls are plain text.
        """
        self._tools = frozenset(tools)
        self._channel: Channel = "reasoning" if thinking else "content"
        self._may_think = not thinking  # a think block that the prompt did not open may come first
        self._after_tag = thinking  # white space that comes now belongs to a tag
        self._rest = ""  # undecided text
        self._call: _CallReader | None = None

    def push(self, text: str) -> list[Event]:
        """Returns what is now certain."""
        self._rest += text
        return _joined(self._events(final=False))

    def finish(self) -> list[Event]:
        """Returns what was held back when the reply ends."""
        return _joined(self._events(final=True))

    def _events(self, final: bool) -> Iterator[Event]:
        while True:
            if self._call is not None:
                outcome = self._call.read(self._rest, final)
                if outcome is None:
                    return
                yield self._leave_call(self._call, outcome)
                continue
            mark, at = self._next_mark()
            if mark is None:
                sure = self._certain_len(final)
                yield from self._text(self._rest[:sure])
                self._rest = self._rest[sure:]
                return
            before, self._rest = self._rest[:at], self._rest[at + len(mark) :]
            body = before.rstrip()
            yield from self._text(body)
            if mark == CALL:
                self._call = _CallReader(before[len(body) :])
            else:
                self._channel = "reasoning" if mark == THINK else "content"
                self._may_think, self._after_tag = False, True

    def _next_mark(self) -> tuple[str | None, int]:
        """Returns the first tag in the undecided text that means something here, and its place."""
        found = [(at, mark) for mark in self._marks() if (at := self._rest.find(mark)) >= 0]
        at, mark = min(found, default=(-1, None))
        if mark == THINK and self._rest[:at].strip():
            self._may_think = False
            return self._next_mark()
        return mark, at

    def _marks(self) -> list[str]:
        marks = [CALL] if self._tools else []
        if self._channel == "reasoning":
            marks.append(END_THINK)
        elif self._may_think:
            marks.append(THINK)
        return marks

    def _certain_len(self, final: bool) -> int:
        """Returns how much of the undecided text is neither part of a tag nor space before one."""
        if final and self._channel == "content":
            return len(self._rest)
        held = 0 if final else max((overlap(self._rest, mark) for mark in self._marks()), default=0)
        return len(self._rest[: len(self._rest) - held].rstrip())

    def _text(self, text: str) -> Iterator[Text]:
        if self._after_tag:
            text = text.lstrip()
        if text:
            self._after_tag = False
            self._may_think = self._may_think and text.isspace()
            yield Text(self._channel, text)

    def _leave_call(self, reader: "_CallReader", outcome: "Call | NotCall") -> Event:
        """Ends reading a call: with the call, or with its opening tag as text."""
        self._call, self._may_think = None, False
        if isinstance(outcome, Call) and (
            self._channel == "content" or outcome.name in self._tools
        ):
            self._rest, self._after_tag = self._rest[reader.at :], True
            return outcome
        text = CALL if self._after_tag else reader.before + CALL
        self._after_tag = False
        return Text(self._channel, text)


class NotCall:
    """What an opening tag leads to that is no call."""


class _CallReader:
    """Reads one call from the character after its opening tag on, resuming where it stopped.

    Its methods return None where more text must come.
    """

    def __init__(self, before: str):
        """Starts a call that `before`, white space, stood before."""
        self.before = before
        self.at = 0
        self._name = ""
        self._parameter = ""
        self._parameters: list[tuple[str, str]] = []
        self._value_at = self._search_from = 0

    def read(self, text: str, final: bool) -> Call | NotCall | None:
        """Returns the call, or that it is none, or None if more text is needed.

        Args:
          text: everything after the opening tag.
          final: whether no more will come.
        """
        while True:
            if self._parameter:
                step = self._read_value(text)
            elif self._name:
                step = self._read_next(text)
            else:
                step = self._read_function(text)
            if step is None:
                return NotCall() if final else None
            if step is not True:
                return step

    def _read_function(self, text: str) -> Literal[True] | NotCall | None:
        name = self._read_name(text, _FUNCTION)
        if isinstance(name, str):
            self._name = name
            return True
        return name

    def _read_next(self, text: str) -> Call | NotCall | Literal[True] | None:
        """Reads what follows the function's name or a value."""
        start = _skip_space(text, self.at)
        if text.startswith(_END_FUNCTION, start):
            return self._end(text, start + len(_END_FUNCTION))
        if text.startswith(END_CALL, start):  # the function's own end is missing
            return self._end(text, start)
        tags = (_PARAMETER, _END_FUNCTION, END_CALL)
        if any(tag.startswith(text[start:]) for tag in tags):
            return None
        name = self._read_name(text, _PARAMETER)
        if isinstance(name, str):
            self._parameter, self._value_at, self._search_from = name, self.at, self.at
            return True
        return name

    def _end(self, text: str, after: int) -> Call | NotCall | None:
        """Returns the call if its closing tag follows."""
        start = _skip_space(text, after)
        if text.startswith(END_CALL, start):
            self.at = start + len(END_CALL)
            return Call(self._name, tuple(self._parameters))
        return None if END_CALL.startswith(text[start:]) else NotCall()

    def _read_name(self, text: str, tag: str) -> str | NotCall | None:
        """Reads `tag NAME >`."""
        start = _skip_space(text, self.at)
        if not text.startswith(tag, start):
            return None if tag.startswith(text[start:]) else NotCall()
        start += len(tag)
        most = start + MAX_NAME_LEN + 1
        end = text.find(">", start, most)
        name = text[start : end if end >= 0 else most]
        if len(name) > MAX_NAME_LEN or "<" in name or "\n" in name:
            return NotCall()
        if end < 0:
            return None
        self.at = end + 1
        return name.strip() or NotCall()

    def _read_value(self, text: str) -> Literal[True] | None:
        """Reads a value up to the tag that ends it.

        A value may hold tags as text: its end is a closing tag that something else of a call
        follows. A missing closing tag is forgiven where the function ends.
        """
        while True:
            close = text.find(_END_PARAMETER, self._search_from)
            end = text.find(_END_FUNCTION, self._search_from)
            if close < 0 and end < 0:
                self._search_from = max(self._search_from, len(text) - len(_END_PARAMETER) + 1)
                return None
            proper = close >= 0 and (end < 0 or close < end)
            at, tag = (close, _END_PARAMETER) if proper else (end, _END_FUNCTION)
            after = _skip_space(text, at + len(tag))
            followers = (_PARAMETER, _END_FUNCTION, END_CALL) if proper else (END_CALL,)
            if any(text.startswith(follower, after) for follower in followers):
                value = text[self._value_at : at].removeprefix("\n").removesuffix("\n")
                self._parameters.append((self._parameter, value))
                self._parameter, self.at = "", at + len(tag) if proper else at
                return True
            self._search_from = at
            if any(follower.startswith(text[after:]) for follower in followers):
                return None
            self._search_from += len(tag)


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest ending of `text` that begins `mark`, not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _joined(events: Iterator[Event]) -> list[Event]:
    """Returns events with neighbouring text of one channel joined."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text) and last.channel == event.channel:
            joined[-1] = Text(event.channel, last.text + event.text)
        else:
            joined.append(event)
    return joined
