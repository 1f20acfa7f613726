"""The chat page in headless Chromium: it streams, stops, edits, regenerates, and stays at home."""

import json

import pytest

from tests.server.chromium import CHROMIUM, opened

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.xdist_group("page"),  # one browser for all
]

ASK = "Write a Python function `read_lines(path)`: return the lines of a text file."


@pytest.fixture(scope="module")
def browser(address, tmp_path_factory):
    with opened(tmp_path_factory.mktemp("chromium")) as page:
        page.call("Page.navigate", url=address)
        page.wait_for("document.readyState === 'complete' && model")
        yield page
        assert page.failures == []


@pytest.fixture
def page(browser):
    """The page as a visitor finds it, but greedy and short."""
    browser.evaluate("$('new').click(); $('temperature').value = '0'; $('most').value = '4'")
    browser.wait_for("!running && turns.length === 0")
    return browser


@pytest.fixture
def asked(page):
    """The page after one question and its answer."""
    say(page, ASK)
    page.wait_for("!running && turns.length === 2")
    return page


def say(page, text):
    page.evaluate(f"$('ask').value = {json.dumps(text)}; $('form').requestSubmit()")


def press(page, button):
    page.evaluate(
        f"[...document.querySelectorAll('button')].find(b => b.innerText == {button!r}).click()"
    )


def shown(page, index):
    return page.evaluate(f"document.querySelectorAll('.turn')[{index}]?.innerText ?? ''")


def test_an_answer_streams_in_and_shows_its_speed_and_acceptance(page, tmp_path):
    page.evaluate("$('most').value = '40'")
    say(page, ASK)
    assert page.evaluate("$('go').textContent") == "Stop"
    page.wait_for("!running")
    answer = shown(page, 1)
    assert "def read_lines(path):" in answer and "```" not in answer
    assert "tokens/s" in answer and "of drafts accepted" in answer
    assert page.evaluate("document.querySelectorAll('.turn pre').length") == 1
    assert page.screenshot(tmp_path / "page.png").startswith(b"\x89PNG")


def test_a_message_can_be_edited_and_sent_again(asked):
    press(asked, "Edit")
    asked.evaluate(
        f"document.querySelector('.turn textarea').value = {json.dumps(ASK + ' Again.')}"
    )
    press(asked, "Send again")
    asked.wait_for("!running")
    assert shown(asked, 0).startswith(ASK + " Again.") and asked.evaluate("turns.length") == 2


def test_an_answer_can_be_regenerated(asked):
    before = asked.evaluate("window.first = turns[1]; first.text")
    press(asked, "Regenerate")
    asked.wait_for("!running && turns.length === 2 && turns[1] !== first")
    assert before and asked.evaluate("turns[1].text") == before


def test_an_answer_can_be_stopped(page):
    page.evaluate("$('most').value = '900'; $('temperature').value = '2'")
    say(page, "Write a long text.")
    page.wait_for("turns[1].text.length > 20")
    page.evaluate("$('form').requestSubmit()")
    page.wait_for("!running")
    assert "stopped" in shown(page, 1)


def test_markup_in_text_is_shown_as_text(page):
    say(page, "<img src=x onerror='window.broken = 1'><b>bold</b>")
    page.wait_for("!running")
    assert page.evaluate("window.broken === undefined && !document.querySelector('.turn b')")
    assert "<b>bold</b>" in shown(page, 0)


def test_nothing_outside_is_asked_for(asked, address):
    assert asked.requests
    assert all(url.startswith((address, "data:", "about:")) for url in asked.requests)
