"""The text that formats are measured on."""

from __future__ import annotations

from typing import Any

import pytest

from kvant.demo import held_out, is_held_out, library_files, load_probe_prompts
from kvant.eval import evaluation
from kvant.eval.evaluation import split_text


class Letters:
    """A token a letter; a text begins with token 1 where `bos` says so."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id else []
        return begin + [ord(letter) for letter in text]


def told(found: evaluation.EvaluationText) -> list[str]:
    return ["".join(map(chr, piece[0].tolist())) for piece in found.pieces]


def test_a_text_is_cut_into_pieces_of_the_context() -> None:
    assert told(split_text(Letters(), "abcdefghij", 4, 99)) == ["abcd", "efgh", "ij"]
    assert told(split_text(Letters(), "abcdefghij", 4, 7)) == ["abcd", "efg"]
    assert told(split_text(Letters(), "abcdefghi", 4, 99)) == [
        "abcd",
        "efgh",
    ]  # one token predicts none
    assert told(split_text(Letters(bos=33), "abcdef", 4, 99)) == ["!abc", "!def"]


def test_documents_take_turns_and_short_ones_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "held_out", lambda: ["abcdefgh", "no", "vwxyz"])
    assert told(split_text(Letters(), None, 4, 99)) == ["abcd", "vwxy", "efgh"]
    assert told(split_text(Letters(), None, 10, 99)) == ["abcdefgh", "no", "vwxyz"]  # all are short


def test_the_digest_tells_tokens_and_pieces_apart() -> None:
    ways: list[Any] = [("abcdefgh", 4, 99), ("abcdefgi", 4, 99), ("abcdefgh", 8, 99)]
    assert len({split_text(Letters(), *way).digest for way in ways}) == 3
    assert split_text(Letters(), *ways[0]).digest == split_text(Letters(), "abcdefgh?", 4, 8).digest


@pytest.mark.parametrize(("words", "context"), [("", 8), ("a", 8), ("abc", 1)])
def test_what_predicts_nothing_is_refused(words: str, context: int) -> None:
    with pytest.raises(ValueError, match="2"):
        split_text(Letters(), words, context, 99)


def test_a_fiftieth_of_the_library_is_held_out() -> None:
    files = library_files()
    held = [words for name, words in files if is_held_out(name)]
    assert [*held_out(), *load_probe_prompts()] == held and len(load_probe_prompts()) == 3
    assert 0.01 < len(held) / len(files) < 0.04
    assert is_held_out("ast.py") and not is_held_out("argparse.py")
