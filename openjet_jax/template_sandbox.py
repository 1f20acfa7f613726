"""A jinja2 environment for chat templates of unknown origin.

It is what the `transformers` renderer gives a template (immutable sandbox, `trim_blocks`,
`lstrip_blocks`, loop controls, `tojson` with non-ASCII text and key order kept, `raise_exception`,
`strftime_now`), with bounds on what a rendering may cost: loop turns, calls, time, sizes. They stop
templates that do not end and the usual ways to ask for much memory, not every way (`replace`).
"""

import contextlib
import contextvars
import dataclasses
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import jinja2
import jinja2.filters
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""Most loop turns, calls and filters of one rendering."""

MAX_SECONDS = 10.0
"""Longest rendering; one takes milliseconds."""

MAX_SIZE = 1 << 26
"""Longest text, in characters, longest list, and largest number that a call may be given."""


@dataclasses.dataclass
class _Budget:
    steps: int
    deadline: float

    def spend(self):
        self.steps -= 1
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise jinja2.TemplateRuntimeError(
                f"the template takes more than {MAX_STEPS} steps or {MAX_SECONDS:g} s; "
                "it does not end or is not a chat template"
            )


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("template_budget")


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Gives everything that is done with a template inside it one budget of steps and time."""
    token = _budget.set(_Budget(MAX_STEPS, time.monotonic() + MAX_SECONDS))
    try:
        yield
    finally:
        _budget.reset(token)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; templates are compiled and rendered inside `limited()`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self):
        """Sets the options, filters and functions that chat templates are written for."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationBlock],
        )
        self.filters["tojson"] = _tojson
        self.filters.update({name: _charged(run) for name, run in self.filters.items()})
        self.filters |= {"counted turns": _turns, "joined text": _joined}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def read(self, source: str) -> nodes.Template:
        """Returns the template's syntax tree, with a counter in each loop and concatenation.

        Raises:
          jinja2.TemplateSyntaxError: the source is not a jinja2 template.
        """
        tree = self.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered("counted turns", loop.iter)
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filtered("joined text", nodes.List(concat.nodes))]
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        """Joins a template's output."""
        return _joined(parts)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Calls a function or method on a template's behalf."""
        _charge(*args, *kwargs.values())
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ in ("format", "format_map"):
            _check_widths(owner)
        return _checked(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes `left operator right`, unless that would be out of all proportion."""
        if operator == "%":
            _check_widths(left)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > 64:
                raise _oversize()
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                    if len(sequence) * count > MAX_SIZE:
                        raise _oversize()
        return _checked(super().call_binop(context, operator, left, right))


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks training text, renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Returns the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filtered(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None)


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.spend()
        yield item


def _joined(parts: Iterable[Any]) -> str:
    texts: list[str] = []
    length = 0
    for part in parts:
        texts.append(str(part))
        length += len(texts[-1])
        if length > MAX_SIZE:
            raise _oversize()
    return "".join(texts)


def _charge(*values: Any):
    """Takes a step with these arguments."""
    _budget.get().spend()
    if any(isinstance(value, int) and abs(value) > MAX_SIZE for value in values):
        raise _oversize()


def _charged(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def charged(*args, **kwargs):
        _charge(*args, *kwargs.values())
        if run is jinja2.filters.do_format:
            _check_widths(args[0])
        return _checked(run(*args, **kwargs))

    return charged


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_SIZE:
        raise _oversize()
    return value


def _check_widths(form: Any):
    """Refuses formats that pad to millions of characters, or to a width that is computed."""
    if isinstance(form, str) and re.search(r"\d{7}|%[^%a-z]*\*|\{[^{}]*\{", form):
        raise _oversize()


def _oversize() -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(
        f"the template makes a text or number larger than {MAX_SIZE}; it is not a chat template"
    )


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
