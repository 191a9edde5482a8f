"""The texts of tools/texts.py are there, long enough, and in the order of their packages."""

from __future__ import annotations

import pytest

import texts
from quality_texts import TOKENS
from texts import TEXTS, compute_digests, load_text

CHARACTERS_OF_TOKEN = 5  # four or fewer of SmolLM2's; the rest is slack for other versions


@pytest.mark.parametrize("name", TEXTS)
def test_text_is_estimated_to_have_the_tokens_that_are_measured(name: str) -> None:
    assert len(load_text(name)) / CHARACTERS_OF_TOKEN > TOKENS


def test_digests_tell_texts_apart() -> None:
    digests = compute_digests()
    assert [*digests] == [*TEXTS] and len({*digests.values()}) == len(TEXTS)
    assert compute_digests() == digests


def test_unknown_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text poems: known are prose, code, instructions"):
        load_text("poems")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "INSTRUCTIONS_PACKAGE", "no-such-package")
    with pytest.raises(ValueError, match="pip install no-such-package"):
        load_text("instructions")
