"""The texts of tools/texts.py are there, long enough, and in the order of their packages."""

from __future__ import annotations

import pytest

import texts
from texts import TEXTS, load_text


@pytest.mark.parametrize("name", TEXTS)
def test_text_has_forty_thousand_tokens(name: str) -> None:
    text = load_text(name)
    assert len(text) > 200_000  # SmolLM2's tokens have four characters, as those of most models
    assert text == load_text(name)


def test_unknown_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text poems: known are prose, code, instructions"):
        load_text("poems")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "INSTRUCTIONS_PACKAGE", "no-such-package")
    with pytest.raises(ValueError, match="pip install no-such-package"):
        load_text("instructions")
