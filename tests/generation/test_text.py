"""Test streaming of text: no character is lost or split, and stop strings stay hidden."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvant import demo
from kvant.generation.loop import REPLACEMENT_CHARACTER, IncrementalDetokenizer

MIXED = "naïve 日本語 🙂 text"


@cache
def load_demo_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture
def tokenizer() -> Any:
    return load_demo_tokenizer()


def stream_text(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """Return the text that each token adds, and finally the rest."""
    text = IncrementalDetokenizer(tokenizer, stop)
    return [text.append_token(token) for token in tokens] + [text.flush()]


class PieceTokenizer:
    """A tokenizer with a given string per token."""

    def __init__(self, *strings: str) -> None:
        self.strings = strings

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.strings[token] for token in tokens)


class CleaningTokenizer:
    """A tokenizer like sentencepiece: a text does not begin with a space."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize("seed", range(40))
def test_streamed_text_of_random_tokens_equals_decoding_all(tokenizer: Any, seed: int) -> None:
    """Many are parts of characters that are never completed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, len(tokenizer), (1 + 2 * seed,), generator=generator).tolist()
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(stream_text(tokenizer, tokens)) == expected


@given(st.text(max_size=40))
def test_any_text_round_trips(text: str) -> None:
    tokenizer = load_demo_tokenizer()
    tokens = tokenizer.encode(text)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(stream_text(tokenizer, tokens)) == expected


def test_characters_are_never_split(tokenizer: Any) -> None:
    texts = stream_text(tokenizer, tokenizer.encode(MIXED))
    assert "".join(texts) == MIXED
    assert not any(REPLACEMENT_CHARACTER in piece for piece in texts)
    assert "" in texts[:-1], "no character of more than one token, so nothing was tested"
    assert texts[-1] == ""


def test_undecided_text_is_released_at_the_end(tokenizer: Any) -> None:
    token = tokenizer.encode("🙂")[0]
    text = IncrementalDetokenizer(tokenizer)
    assert text.append_token(token) == ""
    assert text.flush() == REPLACEMENT_CHARACTER
    assert text.flush() == "", "said twice"


def test_long_text_looks_back_as_far_as_the_tokenizer_needs() -> None:
    tokens = [1, 2, 3] * 20
    assert "".join(stream_text(CleaningTokenizer(), tokens)) == CleaningTokenizer().decode(tokens)


@pytest.mark.parametrize(
    ("strings", "stop", "expected"),
    [
        (("one ", "st", "op", " two"), ("stop",), "one "),
        (("one stop two",), ("stop",), "one "),
        (("s", "t", "o", "p"), ("stop",), ""),
        (("a", "st", "st", "op", "b"), ("stop",), "ast"),
        (("aab", "aab", "c"), ("aabc",), "aab"),
        (("x", "END", "y", "stop"), ("stop", "END"), "x"),
        (("both stop END",), ("END", "stop"), "both "),
        (("ab", "c", "d"), ("abcd", "bc"), "a"),
        (("line\n", "\nnext"), ("\n\n",), "line"),
    ],
    ids=str,
)
def test_stop_strings_end_the_text_and_are_hidden(
    strings: tuple[str, ...], stop: tuple[str, ...], expected: str
) -> None:
    text = IncrementalDetokenizer(PieceTokenizer(*strings), stop)
    visible_text = "".join(
        text.append_token(token) for token in range(len(strings)) if not text.has_stopped
    )
    assert text.has_stopped
    assert visible_text + text.flush() == expected


def test_stop_string_may_span_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode(MIXED)
    text, visible_text = IncrementalDetokenizer(tokenizer, ["本語 🙂 t"]), ""
    for token in tokens:
        visible_text += text.append_token(token)
        if text.has_stopped:
            break
    assert text.has_stopped
    assert visible_text + text.flush() == "naïve 日"


def test_possible_stop_string_is_withheld_until_decided() -> None:
    text = IncrementalDetokenizer(PieceTokenizer("one st", "o", "ry", " s", "t"), ["stop"])
    assert [text.append_token(token) for token in range(5)] == ["one ", "", "story", " ", ""]
    assert not text.has_stopped
    assert text.flush() == "st"
    assert text.flush() == "", "said twice"


def test_stop_string_is_found_in_withheld_partial_text() -> None:
    """The rest is ordinary text: a stop string in it is hidden, too."""
    text = IncrementalDetokenizer(PieceTokenizer("a", "stop" + REPLACEMENT_CHARACTER), ["stop"])
    assert text.append_token(0) == "a"
    visible_text = text.append_token(1)
    assert visible_text + text.flush() == ""


def test_text_streams_at_once_without_stop_strings() -> None:
    assert stream_text(PieceTokenizer("st", "op"), [0, 1]) == ["st", "op", ""]


def test_absent_stop_string_changes_nothing(tokenizer: Any) -> None:
    tokens = tokenizer.encode(MIXED)
    assert "".join(stream_text(tokenizer, tokens, ("absent", "textual"))) == MIXED
