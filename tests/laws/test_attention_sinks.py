"""By default no spec leaves out the first tokens, on which a model may lean."""

from __future__ import annotations

import pytest

from hf import sink_model
from kvant.attention import page_selection
from kvant.contracts import Mask, View
from kvant.page_table import Ints
from kvant.probing.divergence import Divergence, measure_divergence

SELECTIONS = ("affine8,select=25%", "raw,select=1", "turbo4,select=12%", "affine8,select=1:0")


def damage(spec: str) -> Divergence:
    return measure_divergence(sink_model.build(), [sink_model.predictable_text(1000)], spec)


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4"])
@pytest.mark.parametrize("window", [100, 256])
def test_a_window_keeps_the_first_tokens_by_default(spec: str, window: int) -> None:
    kept, gone = damage(f"{spec},window={window}"), damage(f"{spec},window={window},sinks=0")
    assert kept.raw_perplexity < 2
    assert kept.perplexity_change < 0.01 and kept.mean_kl < 1e-3
    assert gone.perplexity_change > 10 and gone.mean_kl > 1, "the model does lean on them"


@pytest.mark.parametrize("spec", [*SELECTIONS, "affine8,window=512,select=1:0"])
def test_a_selection_reads_the_first_tokens(spec: str) -> None:
    found = damage(spec)
    assert found.perplexity_change < 0.01 and found.mean_kl < 1e-3


@pytest.mark.parametrize("spec", SELECTIONS)
def test_bounds_alone_leave_them_out(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = page_selection._compute_page_ranges

    def bounds_alone(view: View, rule: Mask, queries: int) -> Ints:
        found = ranges(view, rule, queries)
        found[..., page_selection.FIRST_CANDIDATE] = found[..., page_selection.LOW_PAGE]
        return found

    monkeypatch.setattr(page_selection, "_compute_page_ranges", bounds_alone)
    assert damage(spec).mean_kl > 0.1
