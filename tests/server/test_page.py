"""Test the page in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from kvant.server import ApiKeys
from server.conftest import serve_model
from server.speaking import make_speaker

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
PROMPT = "import os\n\ndef read(path):\n"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install it")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Any, running: tuple[Any, str]) -> Iterator[Any]:
    context = browser.new_context()
    page, wrong = context.new_page(), list[str]()
    page.on(
        "console",
        lambda console_message: (
            wrong.append(console_message.text) if console_message.type == "error" else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(running[1])
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens").fill("12")
    yield page
    context.close()
    assert not [
        console_message for console_message in wrong if "400" not in console_message
    ]  # shown by the page itself


def send_message(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def read_replies(page: Any) -> list[str]:
    """Return the replies once the last one is complete."""
    playwright.expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
    texts: list[str] = page.locator("article.assistant pre").all_text_contents()
    return texts


def test_page_shows_the_reply_and_its_figures(page: Any, running: tuple[Any, str]) -> None:
    send_message(page, PROMPT)
    (reply,) = read_replies(page)
    stream = running[0].engine.submit(PROMPT, max_new_tokens=12)
    assert reply == stream.result().text
    note = page.locator("article.assistant p").inner_text()
    assert "12 tokens" in note and "tokens of the prompt" in note
    playwright.expect(page.locator("#memory")).to_contain_text("a token (affine8)")


def test_reasoning_is_not_part_of_the_reply(browser: Any) -> None:
    with serve_model(*make_speaker("<think>", "Hm.", "</think>", "Yes."), pack=False) as (_, url):
        page = browser.new_page()
        page.goto(url)
        send_message(page, "Is it so?")
        assert read_replies(page) == ["Yes."]
        page.close()


def test_escape_stops_a_reply(page: Any, running: tuple[Any, str]) -> None:
    page.get_by_label("Tokens").fill("1500")
    send_message(page, PROMPT)
    playwright.expect(page.locator("article.assistant pre")).not_to_be_empty(timeout=30_000)
    page.keyboard.press("Escape")
    read_replies(page)
    assert page.locator("article.assistant p").inner_text() == "stopped"


def test_edited_message_starts_a_new_branch(page: Any) -> None:
    for text in (PROMPT, "    # more\n"):
        send_message(page, text)
        read_replies(page)
    page.get_by_role("button", name="Edit message 1").click()
    assert page.get_by_label("Message", exact=True).input_value() == PROMPT
    send_message(page, "class Tree:\n")
    assert len(read_replies(page)) == 1
    assert page.locator("article.user pre").all_text_contents() == ["class Tree:\n"]


def test_reload_keeps_the_chat_and_tabs_are_separate(page: Any, running: tuple[Any, str]) -> None:
    send_message(page, PROMPT)
    replies = read_replies(page)
    page.reload()
    assert read_replies(page) == replies
    other = page.context.new_page()
    other.goto(running[1])
    assert other.locator("article").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0


def test_page_works_by_keyboard_alone(page: Any) -> None:
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("import os")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    assert len(read_replies(page)) == 1
    assert page.locator("article.user pre").inner_text() == "import os\n"
    playwright.expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_markup_is_shown_as_text(page: Any) -> None:
    send_message(page, "<img src=x onerror=alert(1)><script>alert(2)</script>")
    read_replies(page)
    assert page.locator("article img, article script").count() == 0


def test_error_is_shown(page: Any) -> None:
    send_message(page, PROMPT * 400)
    read_replies(page)
    assert "shorten it" in page.locator("article.assistant p.error").inner_text()


def test_a_tenant_sees_its_own_figures(browser: Any, bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, keys=ApiKeys(["first-key"], admins=["admin-key"])) as (_, url):
        page = browser.new_page()
        page.goto(url)
        for key, expected_text in (
            ("first-key", "your requests: 0 running"),
            ("admin-key", "idle prefix"),
        ):
            page.locator("#key").fill(key)
            page.locator("#key").dispatch_event("change")
            playwright.expect(page.locator("#memory")).to_contain_text(expected_text)
            playwright.expect(page.locator("#bar")).to_be_visible(visible=key == "admin-key")
        page.close()
