"""Test images on the page in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from server.test_page import CHROMIUM, browser, playwright, read_replies, send_message
from vision.test_vision_server import QUESTION, encode, family, replies, served
from vision.tiny import encode_image, make_image

__all__ = ["browser", "family", "replies", "served"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install it")
# An event that pastes or drops a file with these bytes in base64.
MAKE_EVENT = """([kind, data, type]) => {
  const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "a.png", {type}));
  const target = document.getElementById("text");
  target.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true})
    : new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, served: Any) -> Iterator[Any]:
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 390, "height": 844}
    )
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda entry: wrong.append(entry.text) if entry.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(served[1])
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Tokens").fill("10")
    playwright.expect(page.get_by_role("button", name="Add image")).to_be_visible()
    yield page
    context.close()
    assert not [entry for entry in wrong if "400" not in entry]  # the page shows those


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_pasted_and_dropped_images_are_sent(page: Any, replies: list[str], kind: str) -> None:
    page.evaluate(MAKE_EVENT, [kind, encode(1), "image/png"])
    playwright.expect(page.locator("#images img")).to_have_count(1)
    send_message(page, QUESTION)
    assert read_replies(page) == [replies[0]]
    playwright.expect(page.locator("article.user img")).to_have_count(1)
    playwright.expect(page.locator("#images img")).to_have_count(0)
    send_message(page, "And?")
    assert len(read_replies(page)) == 2
    note = page.locator("article.assistant p").last.inner_text()
    assert "of the prompt cached" in note and not note.split("; ")[1].startswith("0 of")
    page.reload()
    playwright.expect(page.locator("article.user img")).to_have_count(1)
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390


def test_chosen_images_can_be_removed(page: Any) -> None:
    files = [
        {
            "name": f"{number}.png",
            "mimeType": "image/png",
            "buffer": encode_image(make_image(number)),
        }
        for number in (1, 2)
    ]
    page.locator("#file").set_input_files(files)
    playwright.expect(page.locator("#images img")).to_have_count(2)
    page.get_by_role("button", name="Remove image 1").click()
    source = page.locator("#images img").get_attribute("src")
    assert base64.b64decode(source.partition(",")[2]) == files[1]["buffer"]


def test_refused_images_are_explained(page: Any) -> None:
    page.evaluate(MAKE_EVENT, ["paste", base64.b64encode(b"<svg/>").decode(), "image/png"])
    send_message(page, QUESTION)
    read_replies(page)
    note = page.locator("article.assistant p").last
    playwright.expect(note).to_contain_text("is not PNG, JPEG, WebP or GIF")


def test_pages_of_text_models_have_no_images(browser: Any, running: Any) -> None:
    page = browser.new_page()
    page.goto(running[1])
    playwright.expect(page.locator("#memory")).to_contain_text("a token")
    playwright.expect(page.get_by_role("button", name="Add image")).to_be_hidden()
    page.close()
