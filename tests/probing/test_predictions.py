"""What a spec does to predictions: known numbers, and the same whatever the chunks."""

from __future__ import annotations

import copy
import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf import zoo
from kvant.attention import dispatch
from kvant.attention.reference import ReferenceBackend
from kvant.codecs.affine import Affine
from kvant.probing.divergence import Divergence, compare_logits, measure_divergence

SPECS = ("affine4", "turbo4v2", "affine3,sinks=4,tail=0", "affine8,window=96")


def pieces(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, zoo.VOCABULARY, (1, n), generator=generator) for n in lengths]


def test_raw_does_no_damage_at_all() -> None:
    found = measure_divergence(zoo.build("llama"), pieces(150, 80), "raw", chunk=64)
    assert found.num_positions == 149 + 79
    assert (found.mean_kl, found.quantile(1.0), found.perplexity_change) == (0.0, 0.0, 0.0)
    assert found.top1 == 1.0


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_and_what_the_spec_says_of_prompts_change_nothing(spec: str) -> None:
    """But for a code here and there that rounding of another matrix product tips over.

    How many do, and where, depends on the order of sums, thus on the processor. So the bound is
    measured: what raw rows change, and what codes do where weights move by a part in a million.
    """
    model, text = zoo.build("llama"), pieces(200)
    whole = measure_divergence(model, text, spec)
    assert whole.mean_kl > 1e-4
    assert torch.equal(measure_divergence(model, text, f"{spec},prefill=dense").kl, whole.kl)
    other = measure_divergence(model, text, spec, chunk=37)
    moved = measure_divergence(with_moved_weights(model), text, spec)
    rounding = (other.raw_loss - whole.raw_loss).abs().max()
    assert rounding < (moved.raw_loss - whole.raw_loss).abs().max()
    tipped = (moved.kl - whole.kl).abs().quantile(0.9)
    assert (other.kl - whole.kl).abs().quantile(0.9) <= rounding + tipped
    assert other.mean_kl == pytest.approx(whole.mean_kl, rel=0.05)
    assert other.perplexity == pytest.approx(whole.perplexity, rel=0.002)


def with_moved_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose weights differ by about 16 times what rounding of one product may change."""
    moved, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in moved.parameters():
            weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator))
    return moved


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "gpt2"])
def test_losses_are_those_of_the_model(name: str) -> None:
    model, (ids,) = zoo.build(name), pieces(90)
    found = measure_divergence(model, [ids], "affine8,tail=0")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(found.raw_loss, expected, atol=1e-3, rtol=1e-3)
    assert 0 < found.mean_kl < 0.1


def test_each_piece_begins_anew() -> None:
    model, (one, other) = zoo.build("llama"), pieces(100, 70)
    together = measure_divergence(model, [one, other], "affine4")
    apart = Divergence.concatenate(
        [measure_divergence(model, [one], "affine4"), measure_divergence(model, [other], "affine4")]
    )
    for field in fields(Divergence):
        assert torch.equal(getattr(together, field.name), getattr(apart, field.name))


def test_numbers_of_known_distributions() -> None:
    raw = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log()
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    found = compare_logits(raw + 7, ours - 3, torch.tensor([0, 1]))
    kl = [0.25 * math.log(2), 0.5 * math.log(2)]
    assert found.kl.tolist() == pytest.approx(kl)
    assert found.raw_loss.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert found.loss.tolist() == pytest.approx([math.log(4), math.log(4)])
    assert found.same_top1.tolist() == [False, True]
    assert (found.mean_kl, found.top1) == (pytest.approx(sum(kl) / 2), 0.5)
    assert (found.raw_perplexity, found.perplexity) == (pytest.approx(2), pytest.approx(4))
    assert found.perplexity_change == pytest.approx(1.0)
    assert (found.quantile(0.5), found.quantile(0.51)) == pytest.approx(tuple(kl))


def test_half_precision_is_compared_in_float32() -> None:
    raw = torch.randn(4, 1000, dtype=torch.bfloat16) * 8
    found = compare_logits(raw, raw + 0.25, torch.zeros(4, dtype=torch.long))
    wide = compare_logits(raw.float(), (raw + 0.25).float(), torch.zeros(4, dtype=torch.long))
    assert found.kl.dtype == torch.float32 and torch.equal(found.kl, wide.kl)


def test_rows_that_are_zeroed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = zoo.build("llama"), pieces(200)
    sound = measure_divergence(model, text, "affine8,tail=0")
    opened = Affine.open
    monkeypatch.setattr(Affine, "open", lambda self, fields: opened(self, fields) * 0)
    with_reference(monkeypatch)
    broken = measure_divergence(model, text, "affine8,tail=0")
    assert torch.equal(broken.kl[:63], torch.zeros(63))  # no page is sealed before
    assert broken.mean_kl > 100 * sound.mean_kl


def test_what_is_no_number_is_infinite_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Affine.open
    monkeypatch.setattr(Affine, "open", lambda self, fields: opened(self, fields) * torch.nan)
    with_reference(monkeypatch)
    found = measure_divergence(zoo.build("llama"), pieces(200), "affine8,tail=0")
    assert found.mean_kl == found.quantile(0.999) == found.perplexity_change == math.inf
    assert found.same_top1[:63].all() and not found.same_top1[64:].any()


def with_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels open pages themselves; the reference asks the codec."""
    monkeypatch.setattr(dispatch, "BACKENDS", [ReferenceBackend()])


@pytest.mark.parametrize(
    ("name", "spec", "text", "why"),
    [
        ("t5", "affine4", pieces(20), "reads an encoder"),
        ("mamba", "raw", pieces(20), "no layer of MambaForCausalLM attends"),
        ("mamba", "affine4", pieces(20), "no layer of this model has any"),
        ("llama", "affine4", [], "no tokens"),
        ("llama", "affine4", pieces(1), "no tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    name: str, spec: str, text: list[Tensor], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        measure_divergence(zoo.build(name), text, spec)
