"""Test that a probe ends within seconds, and that its verdict is cached for the next start."""

from __future__ import annotations

import copy
import json
import re
import warnings
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from hf.outliers import scale_key_channels
from kvant import demo, hf
from kvant.probing import advice, guard
from kvant.probing import verdicts as verdicts_module
from kvant.probing.guard import attach_checked, explain_harm
from kvant.probing.trials import make_trial


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture(scope="module")
def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()


@pytest.fixture
def probe_steps() -> list[tuple[int, int]]:
    return []


def set_slow_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make each reading of the clock `seconds` later than the one before."""
    ticks = count()
    monkeypatch.setattr(verdicts_module, "monotonic", lambda: seconds * next(ticks))


def test_harmless_format_is_recognized_after_a_few_tokens(
    plain_model: Any, tokenizer: Any, probe_steps: list[tuple[int, int]]
) -> None:
    tried = make_trial(plain_model, tokenizer)
    assert (
        explain_harm(plain_model, "affine8", tried, lambda *step: probe_steps.append(step)) is None
    )
    assert probe_steps[0] == (0, tried.ids.shape[1] - 1) and probe_steps[-1][0] <= 256


def test_harmful_format_is_recognized_after_a_few_tokens(
    plain_model: Any, tokenizer: Any, probe_steps: list[tuple[int, int]]
) -> None:
    broken = scale_key_channels(plain_model, 100.0, channels=(3, 11))
    explanation = explain_harm(
        broken,
        "affine4,tail=0",
        make_trial(broken, tokenizer),
        lambda *step: probe_steps.append(step),
    )
    assert (
        explanation is not None
        and "affine4,tail=0 changes predictions of Qwen3ForCausalLM: " in explanation
        and probe_steps[-1][0] <= 256
    )


def test_harm_is_explained_by_an_example_and_a_harmless_spec(
    plain_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "TRIAL_SECONDS", 600.0)
    broken = scale_key_channels(plain_model, 100.0, channels=(3, 11))
    trial = make_trial(broken, tokenizer)
    explanation = explain_harm(broken, "affine4,tail=0", trial) or ""
    assert explanation == explain_harm(broken, "affine4,tail=0", trial)  # stored
    assert re.search(
        r"the most likely token differs at \d+\.\d% of positions \(mean KL \S+, limit 0\.005\)\. ",
        explanation,
    )
    assert re.search(r"After '.+' raw continues '.+', and affine4,tail=0 '.+'\. ", explanation)
    found = re.search(
        r"Take (\S+): mean KL (\S+) here, and (\S+) of raw's bytes at 2,048 tokens, "
        r"where affine4,tail=0 takes (\S+)\. Recall was not tested",
        explanation,
    )
    assert found is not None
    better, mean_kl, of_raw, harmful_of_raw = found.groups()
    assert float(mean_kl) <= trial.max_kl and 1 > float(of_raw) >= float(harmful_of_raw)
    assert explain_harm(broken, better, trial) is None


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ("affine2,tail=0,capacity=1024", "capacity=1024.* at 1,024 tokens"),
        ("affine2,tail=0,window=256", "window=256"),
        ("turbo2,tail=0,prune=kvzip:25%", "prune=kvzip:25%"),
        ("affine2,tail=0,prune=keydiff:25%", "prune=keydiff:25%"),
        ("affine2,tail=0,layers=0:affine8", ""),
    ],
)
def test_promotion_keeps_what_does_not_concern_the_format(
    plain_model: Any, tokenizer: Any, spec: str, kept: str
) -> None:
    details = advice.describe_harm(plain_model, spec, make_trial(plain_model, tokenizer), 600)
    assert details.is_complete and re.search(rf"Take \S*{kept}", details.text)


def test_recipes_are_described_without_a_promotion(plain_model: Any, tokenizer: Any) -> None:
    spec = kvant.parse("affine2,tail=0", plain_model.config.num_hidden_layers)
    details = advice.describe_harm(plain_model, spec, make_trial(plain_model, tokenizer), 600)
    assert details.is_complete and "these recipes" in details.text and "'auto'" in details.text


def test_harm_that_took_too_long_is_explained_by_the_next_start(
    plain_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = scale_key_channels(plain_model, 100.0, channels=(3, 11))
    monkeypatch.setattr(guard, "TRIAL_SECONDS", 600.0)
    with monkeypatch.context() as context:
        context.setattr(advice, "monotonic", (1e3 * tick for tick in count()).__next__)
        explanation = explain_harm(broken, "affine4,tail=0", make_trial(broken, tokenizer)) or ""
    assert ". 'auto' finds" in explanation and "continues" not in explanation
    explanation = explain_harm(broken, "affine4,tail=0", make_trial(broken, tokenizer)) or ""
    assert ". After '" in explanation and ". Take " in explanation


def test_probe_without_enough_time_is_inconclusive(
    plain_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, verdicts: Path
) -> None:
    """Never harmless: no verdict is stored, and the next start probes again."""
    monkeypatch.setattr(guard, "TRIAL_SECONDS", 2.0)
    set_slow_clock(monkeypatch, 0.7)
    explanation = explain_harm(plain_model, "affine8", make_trial(plain_model, tokenizer))
    assert explanation is not None and explanation.startswith(
        "no verdict on affine8 for this Qwen3ForCausalLM: in 2 s only"
    )
    assert "of 1023 tokens were read. To measure it: `kvant eval" in explanation
    assert "likely token" not in explanation, "figures of few tokens look like a verdict"
    assert not verdicts.exists()


def test_second_start_probes_nothing(
    plain_model: Any, tokenizer: Any, probe_steps: list[tuple[int, int]], verdicts: Path
) -> None:
    for _ in range(2):
        actual = attach_checked(
            plain_model,
            "affine8",
            tokenizer,
            guard=True,
            progress=lambda *step: probe_steps.append(step),
        )
        assert actual.warning is None
    hf.detach(plain_model)
    assert probe_steps.count((0, 1023)) == 1
    (file,) = verdicts.iterdir()
    assert json.loads(file.read_text())["harmless"] is True


def test_harmful_format_warns_at_each_start(plain_model: Any, tokenizer: Any) -> None:
    broken = scale_key_channels(plain_model, 100.0, channels=(3, 11))
    for _ in range(2):
        with pytest.warns(UserWarning, match="affine4 changes predictions"):
            kvant.attach(broken, "affine4", tokenizer=tokenizer)
        hf.detach(broken)


WRONG_KL = '{"harmless": false, "mean_kl": null, "top1": 1, "tokens": 1, "total": 1}'


@pytest.mark.parametrize(
    "content", ["", "[]", '{"harmless": true}', "\x00", '{"other": 1}', WRONG_KL]
)
def test_corrupt_verdict_file_is_ignored(
    content: str,
    plain_model: Any,
    tokenizer: Any,
    probe_steps: list[tuple[int, int]],
    verdicts: Path,
) -> None:
    tried = make_trial(plain_model, tokenizer)
    assert explain_harm(plain_model, "affine8", tried) is None
    (file,) = verdicts.iterdir()
    file.write_text(content)
    assert (
        explain_harm(plain_model, "affine8", tried, lambda *step: probe_steps.append(step)) is None
    )
    assert probe_steps


def test_read_only_folder_raises_nothing(plain_model: Any, tokenizer: Any, verdicts: Path) -> None:
    verdicts.parent.mkdir(parents=True)
    verdicts.write_text("a file")
    assert explain_harm(plain_model, "affine8", make_trial(plain_model, tokenizer)) is None


def test_one_different_value_changes_the_key(plain_model: Any) -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    key = verdicts_module.make_key(plain_model, ids)
    clone = copy.deepcopy(plain_model)
    assert verdicts_module.make_key(clone, ids) == key
    weight = clone.model.layers[3].mlp.up_proj.weight
    with torch.no_grad():
        weight[[5, 6]] = weight[[6, 5]]
    assert verdicts_module.make_key(clone, ids) != key
    with torch.no_grad():
        weight[[5, 6]] = weight[[6, 5]]
        assert verdicts_module.make_key(clone, ids) == key
        weight[7, 9] += 1e-3
    assert verdicts_module.make_key(clone, ids) != key
    assert verdicts_module.make_key(plain_model, ids, "other") != key


def test_model_not_determined_by_its_weights_has_no_key(plain_model: Any) -> None:
    clone = copy.deepcopy(plain_model)
    clone.model.layers[0].register_forward_hook(lambda *args: None)
    assert verdicts_module.make_key(clone, torch.zeros(1, 4, dtype=torch.long)) is None


def test_verdict_files_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts_module, "MAX_FILES", 3)
    for number in range(6):
        verdicts_module.store(f"{number}", {"number": number})
    assert len([*verdicts_module.get_folder().iterdir()]) == 3
    assert verdicts_module.load("5", dict) == {"number": 5}


def test_auto_is_chosen_once(
    plain_model: Any, tokenizer: Any, probe_steps: list[tuple[int, int]]
) -> None:
    actual = [
        attach_checked(
            plain_model,
            "auto,max_kl=1,max_lost=1",
            tokenizer,
            guard=True,
            progress=lambda *step: probe_steps.append(step),
        )
        for _ in range(2)
    ]
    hf.detach(plain_model)
    assert actual[0] == actual[1] and len(probe_steps) == len(actual[0].candidates) == 1
    assert actual[0].candidates[-1].harmless and actual[0].candidates[-1].spec == actual[0].spec


def test_unusable_auto_choice_is_probed_again(
    plain_model: Any, tokenizer: Any, verdicts: Path
) -> None:
    auto = "auto,max_kl=1,max_lost=1"
    first = attach_checked(plain_model, auto, tokenizer, guard=True)
    (file,) = verdicts.iterdir()
    for spec in ("zzz9", 5, None):
        file.write_text(json.dumps({"spec": spec, "candidates": []}))
        assert attach_checked(plain_model, auto, tokenizer, guard=True) == first
    hf.detach(plain_model)


def test_hashing_many_weights_uses_none_of_the_budget(
    plain_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []
    monkeypatch.setattr(guard, "TRIAL_SECONDS", 2.0)
    monkeypatch.setattr(guard, "assess", lambda *_, **options: seconds.append(options["seconds"]))
    with pytest.raises(AttributeError):  # no verdict
        explain_harm(plain_model, "affine8", make_trial(plain_model, tokenizer))
    assert seconds == [2.0]


def test_failed_write_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    verdicts_module.store("key", {})
    assert not [*verdicts_module.get_folder().iterdir()]


def test_disabled_guard_probes_nothing(plain_model: Any, verdicts: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.attach(
            scale_key_channels(plain_model, 100.0, channels=(3, 11)), "affine4", guard=False
        )
    assert not verdicts.exists()
