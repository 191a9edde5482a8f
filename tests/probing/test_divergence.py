"""Test the effect of a spec on predictions: known values, and independence of the chunks."""

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
from kvant.probing.divergence import (
    MAX_TRIAL_TAIL,
    Divergence,
    compare_logits,
    compute_logits,
    make_empty_cache,
    make_filled_cache,
    make_unbounded_spec,
    measure_divergence,
    read_prompt,
)

SPECS = ("affine4", "turbo4v2", "affine3,sinks=4,tail=0", "affine8,window=96")


def make_pieces(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, zoo.VOCABULARY, (1, n), generator=generator) for n in lengths]


@pytest.mark.parametrize("option", ["start=100", "tail=1024"])
def test_most_rows_of_a_trial_are_sealed(option: str) -> None:
    """Regression: a format was called harmless of which hardly a page was sealed."""
    model = zoo.build("llama")
    (layer, *_) = make_unbounded_spec(model, f"turbo2,{option}").layers
    assert (layer.dense_until, layer.paging.tail) == (0, layer.paging.tail)
    assert layer.paging.tail <= MAX_TRIAL_TAIL
    context = model.config.max_position_embeddings
    (never_sealed, *_) = make_unbounded_spec(model, f"turbo2,start={context}").layers
    assert never_sealed.dense_until == context


def test_raw_has_exactly_zero_damage() -> None:
    result = measure_divergence(zoo.build("llama"), make_pieces(150, 80), "raw", chunk=64)
    assert result.num_positions == 149 + 79
    assert (result.mean_kl, result.quantile(1.0), result.perplexity_change) == (0.0, 0.0, 0.0)
    assert result.top1 == 1.0


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_and_prefill_options_change_nothing(spec: str) -> None:
    """Except for codes that rounding of another matrix product flips.

    Their number depends on the order of sums, thus on the processor. So the bound is measured: the
    effect on raw rows, and on codes if weights change by a millionth.
    """
    model, text = zoo.build("llama"), make_pieces(200)
    whole = measure_divergence(model, text, spec)
    assert whole.mean_kl > 1e-4
    assert torch.equal(measure_divergence(model, text, f"{spec},prefill=dense").kl, whole.kl)
    other = measure_divergence(model, text, spec, chunk=37)
    perturbed_damage = measure_divergence(perturb_weights(model), text, spec)
    rounding = (other.raw_loss - whole.raw_loss).abs().max()
    assert rounding < (perturbed_damage.raw_loss - whole.raw_loss).abs().max()
    tipped = (perturbed_damage.kl - whole.kl).abs().quantile(0.9)
    assert (other.kl - whole.kl).abs().quantile(0.9) <= rounding + tipped
    assert other.mean_kl == pytest.approx(whole.mean_kl, rel=0.05)
    assert other.perplexity == pytest.approx(whole.perplexity, rel=0.002)


def perturb_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose weights differ by about 16 roundings of one product."""
    perturbed, generator = copy.deepcopy(model), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in perturbed.parameters():
            weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator))
    return perturbed


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "gpt2"])
def test_losses_equal_those_of_the_model(name: str) -> None:
    model, (ids,) = zoo.build(name), make_pieces(90)
    result = measure_divergence(model, [ids], "affine8,tail=0")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    torch.testing.assert_close(result.raw_loss, expected, atol=1e-3, rtol=1e-3)
    assert 0 < result.mean_kl < 0.1


def test_each_piece_starts_with_an_empty_cache() -> None:
    model, (first, second) = zoo.build("llama"), make_pieces(100, 70)
    batched = measure_divergence(model, [first, second], "affine4")
    separate = Divergence.concatenate(
        [
            measure_divergence(model, [first], "affine4"),
            measure_divergence(model, [second], "affine4"),
        ]
    )
    for field in fields(Divergence):
        assert torch.equal(getattr(batched, field.name), getattr(separate, field.name))


def test_statistics_of_known_distributions_are_exact() -> None:
    raw = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]).log()
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    result = compare_logits(raw + 7, ours - 3, torch.tensor([0, 1]))
    kl = [0.25 * math.log(2), 0.5 * math.log(2)]
    assert result.kl.tolist() == pytest.approx(kl)
    assert result.raw_loss.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert result.loss.tolist() == pytest.approx([math.log(4), math.log(4)])
    assert result.same_top1.tolist() == [False, True]
    assert (result.mean_kl, result.top1) == (pytest.approx(sum(kl) / 2), 0.5)
    assert (result.raw_perplexity, result.perplexity) == (pytest.approx(2), pytest.approx(4))
    assert result.perplexity_change == pytest.approx(1.0)
    assert (result.quantile(0.5), result.quantile(0.51)) == pytest.approx(tuple(kl))


def test_half_precision_is_compared_in_float32() -> None:
    raw = torch.randn(4, 1000, dtype=torch.bfloat16) * 8
    result = compare_logits(raw, raw + 0.25, torch.zeros(4, dtype=torch.long))
    float32_result = compare_logits(
        raw.float(), (raw + 0.25).float(), torch.zeros(4, dtype=torch.long)
    )
    assert result.kl.dtype == torch.float32 and torch.equal(result.kl, float32_result.kl)


def test_zeroed_rows_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = zoo.build("llama"), make_pieces(200)
    sound = measure_divergence(model, text, "affine8,tail=0")
    opened = Affine.open
    monkeypatch.setattr(Affine, "open", lambda self, fields: opened(self, fields) * 0)
    use_reference(monkeypatch)
    broken = measure_divergence(model, text, "affine8,tail=0")
    assert torch.equal(broken.kl[:63], torch.zeros(63))  # no page is sealed before
    assert broken.mean_kl > 100 * sound.mean_kl


def test_nan_logits_are_infinite_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Affine.open
    monkeypatch.setattr(Affine, "open", lambda self, fields: opened(self, fields) * torch.nan)
    use_reference(monkeypatch)
    result = measure_divergence(zoo.build("llama"), make_pieces(200), "affine8,tail=0")
    assert result.mean_kl == result.quantile(0.999) == result.perplexity_change == math.inf
    assert result.same_top1[:63].all() and not result.same_top1[64:].any()


def use_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the reference backend: kernels decode pages themselves, the reference calls the codec."""
    monkeypatch.setattr(dispatch, "BACKENDS", [ReferenceBackend()])


@pytest.mark.parametrize(
    ("name", "spec", "text", "message"),
    [
        ("t5", "affine4", make_pieces(20), "reads an encoder"),
        ("mamba", "raw", make_pieces(20), "no layer of MambaForCausalLM attends"),
        ("mamba", "affine4", make_pieces(20), "no layer of this model has any"),
        ("llama", "affine4", [], "no tokens"),
        ("llama", "affine4", make_pieces(1), "no tokens"),
    ],
)
def test_incomparable_models_are_refused(
    name: str, spec: str, text: list[Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_divergence(zoo.build(name), text, spec)


def test_filled_cache_has_the_rows_of_a_windowed_prompt() -> None:
    """A raw cache knows tokens that a row read through a narrower window does not depend on."""
    model, (prompt, question) = zoo.build("llama"), make_pieces(150, 8)
    raw, windowed = (make_empty_cache(model, spec) for spec in ("raw", "raw,window=40"))
    for cache in (raw, windowed):
        read_prompt(model, prompt, cache)
    expected = compute_logits(model, question, windowed)
    filled = make_filled_cache(model, prompt, "raw,window=40", raw)
    assert torch.equal(compute_logits(model, question, filled), expected)
    recoded = raw.fork()
    recoded.recode(filled.spec)
    assert not torch.allclose(compute_logits(model, question, recoded), expected, atol=1e-3)
    wide = make_filled_cache(model, prompt, "raw,window=150", raw)  # shares the pages of raw
    expected = compute_logits(model, question[:, :1], raw.fork())
    assert torch.equal(compute_logits(model, question[:, :1], wide)[0], expected[0])
