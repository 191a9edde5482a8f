"""A trial ends in seconds, and what it found out is known at the next start."""

from __future__ import annotations

import copy
import json
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from kvant import demo, hf
from kvant.eval.outliers import scale_key_channels
from kvant.probing import assessment, guard
from kvant.probing import verdicts as kept
from kvant.probing.evaluator import make_trial
from kvant.probing.guard import attach_checked, explain_harm


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture(scope="module")
def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()


@pytest.fixture
def steps() -> list[tuple[int, int]]:
    return []


def slow_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each look at the clock is `seconds` after the one before."""
    ticks = count()
    monkeypatch.setattr(assessment, "monotonic", lambda: seconds * next(ticks))


def test_a_harmless_format_is_clear_after_a_few_tokens(
    plain: Any, tokenizer: Any, steps: list[tuple[int, int]]
) -> None:
    tried = make_trial(plain, tokenizer)
    assert explain_harm(plain, "affine8", tried, lambda *step: steps.append(step)) is None
    assert steps[0] == (0, tried.ids.shape[1] - 1) and steps[-1][0] <= 256


def test_a_harmful_format_is_clear_after_a_few_tokens(
    plain: Any, tokenizer: Any, steps: list[tuple[int, int]]
) -> None:
    broken = scale_key_channels(plain, 100.0, channels=(3, 11))
    told = explain_harm(
        broken, "affine4,tail=0", make_trial(broken, tokenizer), lambda *step: steps.append(step)
    )
    assert told is not None and "affine4,tail=0 changes what" in told and steps[-1][0] <= 256


def test_what_the_seconds_do_not_suffice_for_is_unknown(
    plain: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, verdicts: Path
) -> None:
    """Never harmless: nothing of it is kept, and the next start tries again."""
    monkeypatch.setattr(guard, "BUDGET", 2.0)
    slow_clock(monkeypatch, 0.7)
    told = explain_harm(plain, "affine8", make_trial(plain, tokenizer))
    assert told is not None and told.startswith("unknown what affine8 does to Qwen3ForCausalLM")
    assert "of 1023 tokens were read in 2 s" in told and "kvant eval" in told
    assert not verdicts.exists()


def test_a_second_start_tries_nothing(
    plain: Any, tokenizer: Any, steps: list[tuple[int, int]], verdicts: Path
) -> None:
    for _ in range(2):
        found = attach_checked(
            plain, "affine8", tokenizer, guard=True, progress=lambda *step: steps.append(step)
        )
        assert found.warning is None
    hf.detach(plain)
    assert steps.count((0, 1023)) == 1
    (file,) = verdicts.iterdir()
    assert json.loads(file.read_text())["harmless"] is True


def test_a_harmful_format_is_warned_of_at_each_start(plain: Any, tokenizer: Any) -> None:
    broken = scale_key_channels(plain, 100.0, channels=(3, 11))
    for _ in range(2):
        with pytest.warns(UserWarning, match="affine4 changes what"):
            kvant.attach(broken, "affine4", tokenizer=tokenizer)
        hf.detach(broken)


WRONG_KL = '{"harmless": false, "mean_kl": null, "top1": 1, "tokens": 1, "total": 1}'


@pytest.mark.parametrize(
    "content", ["", "[]", '{"harmless": true}', "\x00", '{"other": 1}', WRONG_KL]
)
def test_a_damaged_verdict_is_none(
    content: str, plain: Any, tokenizer: Any, steps: list[tuple[int, int]], verdicts: Path
) -> None:
    tried = make_trial(plain, tokenizer)
    assert explain_harm(plain, "affine8", tried) is None
    (file,) = verdicts.iterdir()
    file.write_text(content)
    assert explain_harm(plain, "affine8", tried, lambda *step: steps.append(step)) is None
    assert steps


def test_a_folder_that_cannot_be_written_is_no_error(
    plain: Any, tokenizer: Any, verdicts: Path
) -> None:
    verdicts.parent.mkdir(parents=True)
    verdicts.write_text("a file")
    assert explain_harm(plain, "affine8", make_trial(plain, tokenizer)) is None


def test_one_value_that_differs_is_another_key(plain: Any) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    key = kept.key_of(plain, ids)
    twin = copy.deepcopy(plain)
    assert kept.key_of(twin, ids) == key
    weight = twin.model.layers[3].mlp.up_proj.weight
    with torch.no_grad():
        weight[[5, 6]] = weight[[6, 5]]
    assert kept.key_of(twin, ids) != key
    with torch.no_grad():
        weight[[5, 6]] = weight[[6, 5]]
        assert kept.key_of(twin, ids) == key
        weight[7, 9] += 1e-3
    assert kept.key_of(twin, ids) != key
    assert kept.key_of(plain, ids, "other") != key


def test_a_model_that_its_weights_do_not_tell_has_no_key(plain: Any) -> None:
    twin = copy.deepcopy(plain)
    twin.model.layers[0].register_forward_hook(lambda *given: None)
    assert kept.key_of(twin, torch.zeros(1, 4, dtype=torch.long)) is None


def test_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_FILES", 3)
    for number in range(6):
        kept.store(f"{number}", {"number": number})
    assert len([*kept.folder().iterdir()]) == 3
    assert kept.load("5", dict) == {"number": 5}


def test_auto_is_chosen_once(plain: Any, tokenizer: Any, steps: list[tuple[int, int]]) -> None:
    found = [
        attach_checked(
            plain,
            "auto,max_kl=1,max_lost=1",
            tokenizer,
            guard=True,
            progress=lambda *step: steps.append(step),
        )
        for _ in range(2)
    ]
    hf.detach(plain)
    assert found[0] == found[1] and len(steps) == len(found[0].candidates) == 1
    assert found[0].candidates[-1].harmless and found[0].candidates[-1].spec == found[0].spec


@pytest.mark.parametrize("spec", ["zzz9", 5, None])
def test_a_choice_that_auto_cannot_make_is_found_anew(
    spec: object, plain: Any, tokenizer: Any, verdicts: Path
) -> None:
    auto = "auto,max_kl=1,max_lost=1"
    first = attach_checked(plain, auto, tokenizer, guard=True)
    (file,) = verdicts.iterdir()
    file.write_text(json.dumps({"spec": spec, "candidates": []}))
    assert attach_checked(plain, auto, tokenizer, guard=True) == first
    hf.detach(plain)


def test_a_key_of_many_weights_takes_none_of_the_budget(
    plain: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(guard, "BUDGET", 2.0)
    monkeypatch.setattr(guard, "assess", lambda *_, **given: seconds.append(given["seconds"]))
    with pytest.raises(AttributeError):  # no verdict
        explain_harm(plain, "affine8", make_trial(plain, tokenizer))
    assert seconds == [2.0]


def test_a_write_that_fails_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    kept.store("key", {})
    assert not [*kept.folder().iterdir()]


def test_nothing_is_tried_without_a_guard(plain: Any, verdicts: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.attach(scale_key_channels(plain, 100.0, channels=(3, 11)), "affine4", guard=False)
    assert not verdicts.exists()
