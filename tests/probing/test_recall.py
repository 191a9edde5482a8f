"""What is planted is found by who looks for it, and only then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvant.checkpoints import load
from kvant.probing import recall as module
from kvant.probing.recall import PLANT_DEPTHS, PLANT_KINDS, make_exams, measure_recall


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load(None)[1]


def test_a_prompt_keeps_its_length_and_holds_what_is_asked_for(tokenizer: Any) -> None:
    text = list(range(4096))
    for exam in make_exams(tokenizer, [torch.tensor([text[:900]])], 3, seed=1):
        longest = max(len(one.question + one.answer) for one in exam.planted)
        assert len(exam.prompt) + longest == 900
        assert [(one.kind, one.depth) for one in exam.planted] == [
            (kind, depth) for depth in PLANT_DEPTHS for kind in PLANT_KINDS
        ]
        places = [place(exam.prompt, one.line) for one in exam.planted]
        assert places == sorted(places)
        for one in exam.planted:
            assert one.line[: len(one.question)] == one.question
            assert place(one.line, one.question + one.answer) == 0


def test_the_rest_of_the_text_is_there_in_order(tokenizer: Any) -> None:
    (exam,) = make_exams(tokenizer, [torch.arange(10_000, 10_900)[None]], 1, seed=1)
    left = [token for token in exam.prompt if token >= 10_000]
    assert left == [*range(10_000, 10_000 + len(left))]


def test_a_short_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="too short to plant 8 things"):
        make_exams(tokenizer, [torch.arange(100)[None]], 1, seed=0)


@pytest.mark.parametrize("lost", [None, 0.25])
def test_a_perfect_copier_finds_all_that_it_saw(
    tokenizer: Any, lost: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = make_exams(tokenizer, [torch.arange(900)[None]], 2, seed=2)
    hidden = [one.line for exam in asked for one in exam.planted if one.depth == lost]
    monkeypatch.setattr(module, "make_stored_prefill_spec", lambda model, spec: spec)
    monkeypatch.setattr(module, "make_empty_cache", lambda model, spec: Seen([]))
    monkeypatch.setattr(module, "read_prompt", lambda model, ids, seen: model(ids, seen))
    monkeypatch.setattr(module, "compute_logits", lambda model, ids, seen: model(ids, seen))
    found = measure_recall(Copier(hidden), asked, "raw")
    assert found == {kind: {str(d): float(d != lost) for d in PLANT_DEPTHS} for kind in PLANT_KINDS}


def test_the_model_inside_finds_what_it_read_lately_and_a_window_loses_the_rest() -> None:
    model, tokenizer = load(None)
    text = torch.tensor([tokenizer.encode("import os\n\n\ndef listed(path):\n    pass\n" * 60)])
    asked = make_exams(tokenizer, [text[:, :600]], 2, seed=0)
    raw, short = (measure_recall(model, asked, spec) for spec in ("raw", "raw,window=64,sinks=0"))
    assert raw["copy"]["0.75"] == 1.0
    assert all(share == 0 for depths in short.values() for share in depths.values())


class Seen(list[int]):
    def fork(self) -> Seen:
        return Seen(self)

    def prune(self) -> int:
        return 0


class Copier:
    """Looks for where the last four tokens were before, and says what came then."""

    device = "cpu"

    def __init__(self, hidden: list[list[int]]) -> None:
        self.hidden = hidden

    def __call__(self, ids: torch.Tensor, seen: Seen) -> torch.Tensor:
        logits = torch.zeros(ids.shape[1], 5000)
        for row, token in enumerate(ids[0].tolist()):
            seen.append(token)
            for at in range(len(seen) - 5, -1, -1):
                if seen[at : at + 4] == seen[-4:] and not self.hides(seen[at : at + 4]):
                    logits[row, seen[at + 4]] = 1
                    break
        return logits

    def hides(self, part: list[int]) -> bool:
        return any(place(line, part) >= 0 for line in self.hidden)


def place(text: list[int], part: list[int]) -> int:
    """Where `part` begins, or -1."""
    last = len(text) - len(part)
    return next((i for i in range(last + 1) if text[i : i + len(part)] == part), -1)
