"""Keeping control tokens that are spelled in a conversation apart from those its template writes.

Method. Each control token has one *guard* character (`|` where there is one). Before rendering, the
guard characters inside the conversation's own strings are replaced by *stand-ins*: private-use
characters that occur nowhere else. Where provenance matters it then travels inside the characters
themselves, through `trim`, `tojson`, slicing and joining alike. A control token in the rendered
text has its guard character, so the template wrote it; in the rest the stand-ins are turned back.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class ControlGuard:
    """Stand-ins for the guard characters of a set of control tokens.

    Attributes:
      guards: the guard characters.
    """

    guards: tuple[str, ...]

    def __init__(self, tokens: Iterable[str], literals: Iterable[str], strings: Iterable[str]):
        """Chooses guards and stand-ins.

        Args:
          tokens: texts of the control tokens.
          literals: texts written in the template.
          strings: strings of the conversation.

        Raises:
          ValueError: the texts use up the private-use characters.
        """
        self._tokens = {token: _guard(token) for token in tokens}
        guards = sorted(set(self._tokens.values()))
        literals = set(literals)
        taken = set().union(*literals, *strings, *self._tokens)
        free = (chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in taken)
        try:
            self._stand_ins = {guard: next(free) for guard in guards}
        except StopIteration:
            raise ValueError("a conversation must not use every private-use character") from None
        self.guards = tuple(guards)
        self._any_guard = re.compile("|".join(map(re.escape, guards)) or "(?!)")
        self._kept: dict[str, list[tuple[str, int]]] = {guard: [] for guard in guards}
        for literal in literals:
            for match in self._any_guard.finditer(literal):
                if not self._fits(literal, match.start()):
                    self._kept[match[0]].append((literal, match.start()))

    def concerns(self, string: str) -> bool:
        """Whether the string holds any guard character."""
        return self._any_guard.search(string) is not None

    def hide_all(self, string: str) -> str:
        """Puts a stand-in for every guard character that is not inside a literal of the template.

        Literals are left alone because templates look for them in messages (`</think>`); those
        that could overlap a control token do not count.
        """

        def in_literal(i: int) -> bool:
            kept = self._kept[string[i]]
            return any(i >= at and string.startswith(literal, i - at) for literal, at in kept)

        return self._hide(string, lambda i: not in_literal(i))

    def hide_spelled(self, string: str) -> str:
        """Puts stand-ins only into control tokens, and parts of one at either end of the string."""
        begin = len(string) - len(string.lstrip())
        core = string.strip()
        return self._hide(string, lambda i: self._fits(core, i - begin))

    def reveal(self, text: str) -> str:
        """Turns stand-ins back."""
        for guard, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, guard)
        return text

    def _hide(self, string: str, hidden: Callable[[int], bool]) -> str:
        def stand_in(match: re.Match[str]) -> str:
            return self._stand_ins[match[0]] if hidden(match.start()) else match[0]

        return self._any_guard.sub(stand_in, string)

    def _fits(self, text: str, at: int) -> bool:
        """Whether the guard character at `at` may be a token's, as far as `text` shows."""
        for token, guard in self._tokens.items():
            for i, char in enumerate(token):
                if char == guard == text[at]:
                    before, after = min(at, i), min(len(text) - at, len(token) - i)
                    if text[at - before : at + after] == token[i - before : i + after]:
                        return True
        return False


def _guard(token: str) -> str:
    if "|" in token:
        return "|"
    return next((char for char in token if not char.isalnum()), token[0])


def strings_of(value: Any) -> Iterable[str]:
    """Yields every string inside a value made of mappings and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_of(item)
