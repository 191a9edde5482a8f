"""Test that planted facts are recalled by a model that can see them, and only then."""

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


def test_prompt_keeps_its_length_and_contains_the_facts(tokenizer: Any) -> None:
    text = list(range(4096))
    for exam in make_exams(tokenizer, [torch.tensor([text[:900]])], 3, seed=1):
        longest = max(len(fact.question + fact.answer) for fact in exam.planted)
        assert len(exam.prompt) + longest == 900
        assert [(fact.kind, fact.depth) for fact in exam.planted] == [
            (task, depth) for depth in PLANT_DEPTHS for task in PLANT_KINDS
        ]
        places = [find_part(exam.prompt, fact.line) for fact in exam.planted]
        assert places == sorted(places)
        for fact in exam.planted:
            assert fact.line[: len(fact.question)] == fact.question
            assert find_part(fact.line, fact.question + fact.answer) == 0


def test_remaining_text_keeps_its_order(tokenizer: Any) -> None:
    (exam,) = make_exams(tokenizer, [torch.arange(10_000, 10_900)[None]], 1, seed=1)
    left = [token for token in exam.prompt if token >= 10_000]
    assert left == [*range(10_000, 10_000 + len(left))]


def test_a_short_text_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="too short to plant 8 items"):
        make_exams(tokenizer, [torch.arange(100)[None]], 1, seed=0)


@pytest.mark.parametrize("lost", [None, 0.25])
def test_perfect_copier_recalls_everything(
    tokenizer: Any, lost: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    exams = make_exams(tokenizer, [torch.arange(900)[None]], 2, seed=2)
    hidden_facts = [fact.line for exam in exams for fact in exam.planted if fact.depth == lost]
    monkeypatch.setattr(module, "make_empty_cache", lambda model, spec: Seen([]))
    monkeypatch.setattr(module, "read_prompt", lambda model, ids, visible: model(ids, visible))
    monkeypatch.setattr(module, "compute_logits", lambda model, ids, visible: model(ids, visible))
    recall = measure_recall(Copier(hidden_facts), exams, "raw")
    assert recall == {
        task: {str(d): float(d != lost) for d in PLANT_DEPTHS} for task in PLANT_KINDS
    }


def test_bundled_model_recalls_recent_facts_and_a_window_loses_the_rest() -> None:
    model, tokenizer = load(None)
    text = torch.tensor([tokenizer.encode("import os\n\n\ndef listed(path):\n    pass\n" * 60)])
    exams = make_exams(tokenizer, [text[:, :600]], 2, seed=0)
    raw, short = (measure_recall(model, exams, spec) for spec in ("raw", "raw,window=64,sinks=0"))
    assert raw["copy"]["0.75"] == 1.0
    assert all(share == 0 for depths in short.values() for share in depths.values())


class Seen(list[int]):
    def fork(self) -> Seen:
        return Seen(self)

    def prune(self) -> int:
        return 0


class Copier:
    """A model that finds the last four tokens earlier in the text and copies the next one."""

    device = "cpu"

    def __init__(self, hidden_facts: list[list[int]]) -> None:
        self.hidden = hidden_facts

    def __call__(self, ids: torch.Tensor, visible: Seen) -> torch.Tensor:
        logits = torch.zeros(ids.shape[1], 5000)
        for row, token in enumerate(ids[0].tolist()):
            visible.append(token)
            for position in range(len(visible) - 5, -1, -1):
                if visible[position : position + 4] == visible[-4:] and not self.hides(
                    visible[position : position + 4]
                ):
                    logits[row, visible[position + 4]] = 1
                    break
        return logits

    def hides(self, part: list[int]) -> bool:
        return any(find_part(line, part) >= 0 for line in self.hidden)


def find_part(text: list[int], part: list[int]) -> int:
    """Return where `part` begins, or -1."""
    last = len(text) - len(part)
    return next((i for i in range(last + 1) if text[i : i + len(part)] == part), -1)
