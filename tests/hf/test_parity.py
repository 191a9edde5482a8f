"""Test that every family computes the same with a kvant cache and with the transformers cache.

Raw: equal to eager attention over DynamicCache. Compressed: equal to attention over the rows that
each query sees by the rule, up to rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

import kvant
from hf.expected import expect_decoding, expect_reading, list_problems
from hf.parity import (
    BATCHES,
    TOLERANCE,
    Batch,
    Cell,
    compare_cell,
    generate_text,
    list_pairwise_cells,
    make_transformers_cache,
    model_of,
    prepare_model,
    run_forwards,
    text_of,
)
from hf.zoo import FAMILIES, NAMES, OWN_ATTENTION
from kvant.hf.masks import make_lazy_mask_function
from thin import thin_rows

CELLS = list_pairwise_cells()


# By default every family once, with the other axes in rotation.
LOGITS = thin_rows([(cell,) for cell in CELLS], lambda row: astuple(row[0]))
WAYS = {cell.family: cell.way for param in LOGITS for cell in param.values if not param.marks}
RAW = [cell for cell in CELLS if cell.raw]
# By default every third family, the other way than above where possible; the rest in rotation.
OTHERS = {
    max(
        (cell for cell in RAW if cell.family == name),
        key=lambda cell: (cell.way != WAYS.get(name), (RAW.index(cell) * 7 + turn) % 5),
    )
    for turn, name in enumerate(NAMES)
    if turn % 3 == 0 and any(cell.family == name for cell in RAW)
}


@pytest.mark.parametrize("cell", LOGITS, ids=str)
def test_logits_match_attention_over_the_visible_rows(cell: Cell) -> None:
    result = compare_cell(cell)
    assert result.error < TOLERANCE
    assert list_problems(cell, result) == []


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=() if c in OTHERS else pytest.mark.laws) for c in RAW],
    ids=str,
)
def test_greedy_tokens_equal_those_of_transformers(cell: Cell) -> None:
    family, text = FAMILIES[cell.family], text_of(FAMILIES[cell.family], cell.batch).prompt
    options: dict[str, Any] = {}
    # Transformers prefills in chunks for decoders only, and not without access to a cache.
    if cell.prefill == "chunked" and family.kind in ("decoder", "hybrid"):
        options["prefill_chunk_size"] = cell.chunks[0]
    model = model_of(cell.family, "eager")
    expected = generate_text(model, family, text, make_transformers_cache(model, family), **options)
    with prepare_model(model_of(cell.family), cell.way, "raw") as model:
        cache = kvant.cache_for(model, "raw") if cell.way == "stock" else None
        assert torch.equal(generate_text(model, family, text, cache, **options), expected)


def test_parity_cells_cover_the_required_cases() -> None:
    covered = {(c.family, c.format) for c in CELLS}
    assert len(covered) == 4 * len(NAMES)
    assert len({(c.family, c.way, c.batch) for c in CELLS}) == 4 * len(NAMES)
    assert len({(c.family, c.prefill, c.way) for c in CELLS}) == 4 * len(NAMES)


def test_compressed_rows_differ_from_dense_ones() -> None:
    """Otherwise agreement with the oracle would mean nothing."""
    cell = Cell("llama", "affine8", 1, "one-shot", "stock")
    family, text = FAMILIES["llama"], text_of(FAMILIES["llama"])
    model = model_of("llama")
    ours = run_forwards(model, family, kvant.cache_for(model, cell.spec), text, cell.chunks).logits
    dense = run_forwards(
        model, family, make_transformers_cache(model, family), text, cell.chunks
    ).logits
    assert (ours - dense).abs().max() > 100 * TOLERANCE * dense.std()


def test_fused_cells_are_counted() -> None:
    """Every cell above is checked against the table. `pytest -rP` prints the counts."""
    cells = Counter((cell.way, expect_reading(cell)) for cell in CELLS)
    for (way, reading), count in sorted(cells.items()):
        print(f"{way} models, {reading}: {count} cells")
    num_own_attention = len(OWN_ATTENTION)
    for way, fused, dense in (
        ("stock", 49 - num_own_attention, 9 + num_own_attention),
        ("attached", 55 - num_own_attention, 3 + num_own_attention),
    ):
        families = Counter(expect_reading(Cell(name, "raw", 1, "one-shot", way)) for name in NAMES)
        assert families == {"fused": fused, "materialized": dense, "nothing": 4}


def _list_fused_families(batch: Batch) -> list[str]:
    """Return the families that decode without any mask, once attached."""
    cells = [Cell(name, "affine8", batch, "chunked", "attached") for name in NAMES]
    return [
        c.family for c in cells if expect_reading(c) == "fused" and expect_decoding(c, 2).masks == 0
    ]


@pytest.mark.parametrize(
    ("batch", "name"), thin_rows([(b, name) for b in BATCHES for name in _list_fused_families(b)])
)
def test_mask_memory_is_independent_of_the_context(
    batch: Batch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once attached, transformers makes no mask for a decoded token."""
    mask_sizes: list[int] = []

    def count_mask(host: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def mask(**options: Any) -> Tensor | None:
            mask_ = host(**options)
            if mask_ is not None:
                mask_sizes.append(options["q_length"])
            return mask_

        return make_lazy_mask_function(mask)

    names = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(names, "kvant_sdpa", count_mask(sdpa_mask))
    monkeypatch.setitem(names, "kvant_eager", count_mask(eager_mask))
    family, text = FAMILIES[name], text_of(FAMILIES[name], batch)
    with prepare_model(model_of(name), "attached", "raw") as model:
        run_forwards(model, family, kvant.cache_for(model, "raw"), text, (13, 11))
    assert 1 not in mask_sizes
