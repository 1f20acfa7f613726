"""Stop strings in streamed text: what may be shown, and when to stop."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The text ends at the stop string that is complete first; of several that are complete at the
    same character the longest counts. What comes out does not depend on how the text was cut into
    pieces. Only an ending that may still become a stop string is held back.

    Attributes:
      found: the stop string that ended the text, None as long as none did.
    """

    found: str | None

    def __init__(self, stops: Sequence[str]):
        """Starts an empty text.

        Raises:
          ValueError: a stop string is empty, or `stops` is one string.
        """
        if isinstance(stops, str):
            raise ValueError(f"{stops=} must be a list of strings; write [{stops!r}]")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"{stops=} must not hold an empty string or anything but strings")
        self.found = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the text that is now certain to lie before any stop string.

        Once `found` is set nothing more comes out: later text is dropped.
        """
        if self.found is not None:
            return ""
        text = self._held + text
        starts = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        held_len = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held_len :]
        return text[: len(text) - held_len]

    def finish(self) -> str:
        """Returns what was held back when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
