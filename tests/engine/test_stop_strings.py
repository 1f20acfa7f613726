import hypothesis
import hypothesis.strategies as st
import pytest

from openjet_jax.stop_strings import StopMatcher

letters = st.text("ab\n", max_size=12)
stops_of = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def cut_by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns the text before the stop string that is complete first, and that string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            found = max(ending, key=len)
            return text[: end - len(found)], found
    return text, None


def may_become_a_stop(held: str, stops: list[str]) -> bool:
    return any(len(stop) > len(held) and stop.startswith(held) for stop in stops)


@hypothesis.given(st.lists(letters, max_size=5), stops_of)
@hypothesis.settings(max_examples=500, deadline=None)
def test_a_stream_in_any_pieces_ends_where_the_whole_text_does(pieces, stops):
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        before, found = cut_by_definition(seen, stops)
        assert matcher.found == found
        assert before.startswith(shown)
        held = before[len(shown) :]
        assert not held or (found is None and may_become_a_stop(held, stops))
    shown += matcher.finish()
    assert (shown, matcher.found) == cut_by_definition("".join(pieces), stops)


def test_only_a_possible_beginning_is_held_back():
    matcher = StopMatcher(["</s>", "\nUser:"])
    assert matcher.push("a < b </") == "a < b "
    assert matcher.push("i>\nUse") == "</i>"
    assert matcher.push("r: hello") == ""
    assert matcher.found == "\nUser:"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_without_stop_strings_nothing_is_held_back():
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", ["stop", [""], ["a", 1]])
def test_stop_strings_that_are_none_are_refused(stops):
    with pytest.raises(ValueError, match="stops="):
        StopMatcher(stops)
