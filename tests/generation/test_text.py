"""Test streaming of text: no character is lost or split, and stop strings stay hidden."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvant import demo
from kvant.generation.detokenizer import REPLACEMENT_CHARACTER, IncrementalDetokenizer

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


def make_byte_fallback_tokenizer() -> Any:
    """Make a tokenizer with Llama 2's decoder, and few characters in its vocabulary."""
    words = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
    vocabulary = {word: index for index, word in enumerate((*words, "\u2581", "\u2581a", "a", "b"))}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def encode_bytes(tokenizer: Any, text: str) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [
        token
        for character in text
        for token in (
            [vocabulary[character]]
            if character in vocabulary
            else [vocabulary[f"<0x{byte:02X}>"] for byte in character.encode()]
        )
    ]


RARE = "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35"  # six characters of three bytes


@pytest.mark.parametrize("prompt", ["a", RARE, "b\N{GRINNING FACE}"])
@pytest.mark.parametrize("text", [f"ab{RARE}a", "\xe9" * 9 + "b", "\N{GRINNING FACE}" * 5 + "a"])
def test_rare_characters_are_streamed_whole(prompt: str, text: str) -> None:
    """Regression: windows began within characters, which byte fallback decodes as U+FFFD."""
    tokenizer = make_byte_fallback_tokenizer()
    output = IncrementalDetokenizer(tokenizer, (), encode_bytes(tokenizer, prompt))
    pieces = [output.append_token(token) for token in encode_bytes(tokenizer, text)]
    assert "".join(pieces) + output.flush() == text and sum(map(bool, pieces)) == len(text)


def test_stop_string_of_rare_characters_is_found() -> None:
    tokenizer = make_byte_fallback_tokenizer()
    output = IncrementalDetokenizer(tokenizer, (RARE[3:],), encode_bytes(tokenizer, "a"))
    pieces = [output.append_token(token) for token in encode_bytes(tokenizer, RARE * 2)]
    assert output.has_stopped and "".join(pieces[:18]) == RARE[:3]


@pytest.mark.parametrize("has_fallback", [False, True])
@pytest.mark.parametrize("cut", range(8))
def test_character_that_the_prompt_begins_is_part_of_the_text(
    tokenizer: Any, has_fallback: bool, cut: int
) -> None:
    """Regression: it was lost, and with byte fallback so was text after it."""
    text = "a\N{GRINNING FACE}bab"
    if has_fallback:
        tokenizer = make_byte_fallback_tokenizer()
        tokens = encode_bytes(tokenizer, text)
    else:
        tokens = [tokenizer.convert_tokens_to_ids(c) for c in bytes_to_text(text)]
    output = IncrementalDetokenizer(tokenizer, (), tokens[:cut])
    reply = "".join(output.append_token(token) for token in tokens[cut:]) + output.flush()
    assert reply == text[{0: 0, 1: 1, 5: 2, 6: 3, 7: 4}.get(cut, 1) :]


@pytest.mark.parametrize("has_fallback", [False, True])
def test_replacement_character_of_the_prompt_is_not_repeated(
    tokenizer: Any, has_fallback: bool
) -> None:
    prompt, reply = "ab\N{REPLACEMENT CHARACTER}", "ab"
    if has_fallback:
        tokenizer = make_byte_fallback_tokenizer()
        tokens = [encode_bytes(tokenizer, text) for text in (prompt, reply)]
    else:
        tokens = [tokenizer.encode(text) for text in (prompt, reply)]
    output = IncrementalDetokenizer(tokenizer, (), tokens[0])
    assert "".join(map(output.append_token, tokens[1])) + output.flush() == reply


def bytes_to_text(text: str) -> list[str]:
    """Return the bytes of a text as the characters that byte-level tokenizers call them."""
    encoder = bytes_to_unicode()
    return [encoder[byte] for byte in text.encode()]


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
