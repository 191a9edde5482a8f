"""Test the text that formats are measured on."""

from __future__ import annotations

from typing import Any

import pytest

from kvant.demo import is_held_out, list_library_files, load_held_out_texts, load_probe_prompts
from kvant.eval import evaluation
from kvant.eval.evaluation import split_text


class LetterTokenizer:
    """A tokenizer with a token per letter; `bos` adds token 1 at the start."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id else []
        return begin + [ord(letter) for letter in text]


def decode_pieces(evaluation_text: evaluation.EvaluationText) -> list[str]:
    return ["".join(map(chr, piece[0].tolist())) for piece in evaluation_text.pieces]


def test_a_text_is_cut_into_pieces_of_the_context() -> None:
    assert decode_pieces(split_text(LetterTokenizer(), "abcdefghij", 4, 99)) == [
        "abcd",
        "efgh",
        "ij",
    ]
    assert decode_pieces(split_text(LetterTokenizer(), "abcdefghij", 4, 7)) == ["abcd", "efg"]
    # a single token predicts none
    assert decode_pieces(split_text(LetterTokenizer(), "abcdefghi", 4, 99)) == [
        "abcd",
        "efgh",
    ]
    assert decode_pieces(split_text(LetterTokenizer(bos=33), "abcdef", 4, 99)) == ["!abc", "!def"]


def test_documents_alternate_and_short_ones_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "load_held_out_texts", lambda: ["abcdefgh", "no", "vwxyz"])
    assert decode_pieces(split_text(LetterTokenizer(), None, 4, 99)) == ["abcd", "vwxy", "efgh"]
    # all documents are short
    assert decode_pieces(split_text(LetterTokenizer(), None, 10, 99)) == ["abcdefgh", "no", "vwxyz"]


def test_digest_depends_on_tokens_and_pieces() -> None:
    variants: list[Any] = [("abcdefgh", 4, 99), ("abcdefgi", 4, 99), ("abcdefgh", 8, 99)]
    assert len({split_text(LetterTokenizer(), *way).digest for way in variants}) == 3
    assert (
        split_text(LetterTokenizer(), *variants[0]).digest
        == split_text(LetterTokenizer(), "abcdefgh?", 4, 8).digest
    )


@pytest.mark.parametrize(("words", "context"), [("", 8), ("a", 8), ("abc", 1)])
def test_pieces_without_a_target_are_refused(words: str, context: int) -> None:
    with pytest.raises(ValueError, match="2"):
        split_text(LetterTokenizer(), words, context, 99)


def test_two_percent_of_the_library_are_held_out() -> None:
    files = list_library_files()
    held_out_words = [words for name, words in files if is_held_out(name)]
    assert [*load_held_out_texts(), *load_probe_prompts()] == held_out_words and len(
        load_probe_prompts()
    ) == 3
    assert 0.01 < len(held_out_words) / len(files) < 0.04
    assert is_held_out("ast.py") and not is_held_out("argparse.py")
