"""The page in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from kvant.server import ApiKeys
from server.conftest import served
from server.speaking import speaker

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
    page.on("console", lambda told: wrong.append(told.text) if told.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(running[1])
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens").fill("12")
    yield page
    context.close()
    assert not [told for told in wrong if "400" not in told]  # which the page shows itself


def send(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def replies(page: Any) -> list[str]:
    """Once the last one is whole."""
    playwright.expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=30_000)
    found: list[str] = page.locator("article.assistant pre").all_text_contents()
    return found


def test_it_says_what_the_model_says_and_what_it_took(page: Any, running: tuple[Any, str]) -> None:
    send(page, PROMPT)
    (said,) = replies(page)
    stream = running[0].engine.submit(PROMPT, max_new_tokens=12)
    assert said == stream.result().text
    note = page.locator("article.assistant p").inner_text()
    assert "12 tokens" in note and "tokens of the prompt" in note
    playwright.expect(page.locator("#memory")).to_contain_text("a token (affine8)")


def test_thoughts_are_not_the_reply(browser: Any) -> None:
    with served(*speaker("<think>", "Hm.", "</think>", "Yes."), pack=False) as (_, url):
        page = browser.new_page()
        page.goto(url)
        send(page, "Is it so?")
        assert replies(page) == ["Yes."]
        page.close()


def test_a_reply_is_stopped_with_escape(page: Any, running: tuple[Any, str]) -> None:
    page.get_by_label("Tokens").fill("1500")
    send(page, PROMPT)
    playwright.expect(page.locator("article.assistant pre")).not_to_be_empty(timeout=30_000)
    page.keyboard.press("Escape")
    replies(page)
    assert page.locator("article.assistant p").inner_text() == "stopped"


def test_an_edited_message_begins_another_way(page: Any) -> None:
    for text in (PROMPT, "    # more\n"):
        send(page, text)
        replies(page)
    page.get_by_role("button", name="Edit message 1").click()
    assert page.get_by_label("Message", exact=True).input_value() == PROMPT
    send(page, "class Tree:\n")
    assert len(replies(page)) == 1
    assert page.locator("article.user pre").all_text_contents() == ["class Tree:\n"]


def test_a_reload_keeps_the_chat_and_another_tab_has_its_own(
    page: Any, running: tuple[Any, str]
) -> None:
    send(page, PROMPT)
    said = replies(page)
    page.reload()
    assert replies(page) == said
    other = page.context.new_page()
    other.goto(running[1])
    assert other.locator("article").count() == 0
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0


def test_the_keyboard_is_enough(page: Any) -> None:
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("import os")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    assert len(replies(page)) == 1
    assert page.locator("article.user pre").inner_text() == "import os\n"
    playwright.expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_markup_is_text(page: Any) -> None:
    send(page, "<img src=x onerror=alert(1)><script>alert(2)</script>")
    replies(page)
    assert page.locator("article img, article script").count() == 0


def test_an_error_is_told(page: Any) -> None:
    send(page, PROMPT * 400)
    replies(page)
    assert "shorten it" in page.locator("article.assistant p.wrong").inner_text()


def test_a_tenant_sees_its_own_figures(browser: Any, inside: tuple[Any, Any]) -> None:
    with served(*inside, keys=ApiKeys(["first-key"], admins=["admin-key"])) as (_, url):
        page = browser.new_page()
        page.goto(url)
        for key, shown in (("first-key", "your requests: 0 running"), ("admin-key", "idle prefix")):
            page.locator("#key").fill(key)
            page.locator("#key").dispatch_event("change")
            playwright.expect(page.locator("#memory")).to_contain_text(shown)
            playwright.expect(page.locator("#bar")).to_be_visible(visible=key == "admin-key")
        page.close()
