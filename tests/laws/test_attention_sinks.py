"""Test that no spec drops the first tokens by default, since a model may depend on them."""

from __future__ import annotations

import pytest

from hf import sink_model
from kvant.attention import page_selection
from kvant.contracts import Mask, View
from kvant.page_table import Ints
from kvant.probing.divergence import Divergence, measure_divergence

SELECTIONS = ("affine8,select=25%", "raw,select=1", "turbo4,select=12%", "affine8,select=1:0")


def measure_damage(spec: str) -> Divergence:
    return measure_divergence(
        sink_model.build_sink_model(), [sink_model.predictable_text(1000)], spec
    )


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4"])
@pytest.mark.parametrize("window", [100, 256])
def test_a_window_keeps_the_first_tokens_by_default(spec: str, window: int) -> None:
    with_sinks, without_sinks = (
        measure_damage(f"{spec},window={window}"),
        measure_damage(f"{spec},window={window},sinks=0"),
    )
    assert with_sinks.raw_perplexity < 2
    assert with_sinks.perplexity_change < 0.01 and with_sinks.mean_kl < 1e-3
    assert without_sinks.perplexity_change > 10 and without_sinks.mean_kl > 1, (
        "the model does lean on them"
    )


@pytest.mark.parametrize("spec", [*SELECTIONS, "affine8,window=512,select=1:0"])
def test_selection_includes_the_first_tokens(spec: str) -> None:
    damage = measure_damage(spec)
    assert damage.perplexity_change < 0.01 and damage.mean_kl < 1e-3


@pytest.mark.parametrize("spec", SELECTIONS)
def test_selection_by_bounds_alone_misses_the_first_tokens(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = page_selection._compute_page_ranges

    def bounds_alone(view: View, rule: Mask, queries: int) -> Ints:
        selected = ranges(view, rule, queries)
        selected[..., page_selection.FIRST_CANDIDATE] = selected[..., page_selection.LOW_PAGE]
        return selected

    monkeypatch.setattr(page_selection, "_compute_page_ranges", bounds_alone)
    assert measure_damage(spec).mean_kl > 0.1
