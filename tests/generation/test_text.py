"""From tokens to text: nothing is lost or cut, and stop strings are never shown."""

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
def of_demo() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture
def tokenizer() -> Any:
    return of_demo()


def pieces(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What each token adds, and at last the rest."""
    text = IncrementalDetokenizer(tokenizer, stop)
    return [text.append_token(token) for token in tokens] + [text.flush()]


class Letters:
    """A tokenizer of which each token is a given string."""

    def __init__(self, *strings: str) -> None:
        self.strings = strings

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.strings[token] for token in tokens)


class Cleaning:
    """A tokenizer like those of sentencepiece: a text does not begin with a space."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize("seed", range(40))
def test_random_tokens_give_the_text_of_them_all(tokenizer: Any, seed: int) -> None:
    """Many are parts of characters that never come to an end."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, len(tokenizer), (1 + 2 * seed,), generator=generator).tolist()
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, tokens)) == expected


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = of_demo()
    tokens = tokenizer.encode(text)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(pieces(tokenizer, tokens)) == expected


def test_characters_are_never_cut(tokenizer: Any) -> None:
    found = pieces(tokenizer, tokenizer.encode(MIXED))
    assert "".join(found) == MIXED
    assert not any(REPLACEMENT_CHARACTER in piece for piece in found)
    assert "" in found[:-1], "no character of more than one token, so nothing was tested"
    assert found[-1] == ""


def test_text_that_never_is_certain_is_the_rest(tokenizer: Any) -> None:
    token = tokenizer.encode("🙂")[0]
    text = IncrementalDetokenizer(tokenizer)
    assert text.append_token(token) == ""
    assert text.flush() == REPLACEMENT_CHARACTER
    assert text.flush() == "", "said twice"


def test_a_long_text_looks_back_as_far_as_the_tokenizer_needs() -> None:
    tokens = [1, 2, 3] * 20
    assert "".join(pieces(Cleaning(), tokens)) == Cleaning().decode(tokens)


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
def test_stop_strings_end_the_text_and_are_never_shown(
    strings: tuple[str, ...], stop: tuple[str, ...], expected: str
) -> None:
    text = IncrementalDetokenizer(Letters(*strings), stop)
    shown = "".join(text.append_token(token) for token in range(len(strings)) if not text.stopped)
    assert text.stopped
    assert shown + text.flush() == expected


def test_a_stop_string_across_real_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode(MIXED)
    text, shown = IncrementalDetokenizer(tokenizer, ["本語 🙂 t"]), ""
    for token in tokens:
        shown += text.append_token(token)
        if text.stopped:
            break
    assert text.stopped
    assert shown + text.flush() == "naïve 日"


def test_what_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    text = IncrementalDetokenizer(Letters("one st", "o", "ry", " s", "t"), ["stop"])
    assert [text.append_token(token) for token in range(5)] == ["one ", "", "story", " ", ""]
    assert not text.stopped
    assert text.flush() == "st"
    assert text.flush() == "", "said twice"


def test_a_stop_string_in_what_was_held_as_unfinished() -> None:
    """The rest is text as any other: a stop string in it is not shown either."""
    text = IncrementalDetokenizer(Letters("a", "stop" + REPLACEMENT_CHARACTER), ["stop"])
    assert text.append_token(0) == "a"
    shown = text.append_token(1)
    assert shown + text.flush() == ""


def test_without_stop_strings_every_token_is_said_at_once() -> None:
    assert pieces(Letters("st", "op"), [0, 1]) == ["st", "op", ""]


def test_a_string_that_is_not_there_changes_nothing(tokenizer: Any) -> None:
    tokens = tokenizer.encode(MIXED)
    assert "".join(pieces(tokenizer, tokens, ("absent", "textual"))) == MIXED
