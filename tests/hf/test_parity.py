"""Every family computes with a cache of ours what it computes with the host's own.

Raw: with what eager attention over DynamicCache gives. Compressed: with attention over the rows
that each query sees by the rule, which leaves the format's error and nothing else.
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
from hf.expected import decoding, problems, reading
from hf.parity import (
    BATCHES,
    TOLERANCE,
    Batch,
    Cell,
    compared,
    drive,
    generated,
    handed,
    host_cache,
    model_of,
    pairwise,
    text_of,
)
from hf.zoo import FAMILIES, NAMES, OWN_ATTENTION
from kvant.hf.masks import make_lazy_mask_function
from thin import once

CELLS = pairwise()


# By default every family once, with values of the other axes in turn.
LOGITS = once([(cell,) for cell in CELLS], lambda row: astuple(row[0]))
WAYS = {cell.family: cell.way for param in LOGITS for cell in param.values if not param.marks}
RAW = [cell for cell in CELLS if cell.raw]
# By default every third family, the other way than above where there is one; the rest in turn.
OTHERS = {
    max(
        (cell for cell in RAW if cell.family == name),
        key=lambda cell: (cell.way != WAYS.get(name), (RAW.index(cell) * 7 + turn) % 5),
    )
    for turn, name in enumerate(NAMES)
    if turn % 3 == 0 and any(cell.family == name for cell in RAW)
}


@pytest.mark.parametrize("cell", LOGITS, ids=str)
def test_logits_are_those_of_the_rows_a_query_sees(cell: Cell) -> None:
    result = compared(cell)
    assert result.error < TOLERANCE
    assert problems(cell, result) == []


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, marks=() if c in OTHERS else pytest.mark.laws) for c in RAW],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_host(cell: Cell) -> None:
    family, text = FAMILIES[cell.family], text_of(FAMILIES[cell.family], cell.batch).prompt
    options: dict[str, Any] = {}
    # The host takes in a prompt by chunks for decoders alone, and not where it cannot see a cache.
    if cell.prefill == "chunked" and family.kind in ("decoder", "hybrid"):
        options["prefill_chunk_size"] = cell.chunks[0]
    model = model_of(cell.family, "eager")
    expected = generated(model, family, text, host_cache(model, family), **options)
    with handed(model_of(cell.family), cell.way, "raw") as model:
        cache = kvant.cache_for(model, "raw") if cell.way == "stock" else None
        assert torch.equal(generated(model, family, text, cache, **options), expected)


def test_the_cells_cover_what_they_must() -> None:
    seen = {(c.family, c.format) for c in CELLS}
    assert len(seen) == 4 * len(NAMES)
    assert len({(c.family, c.way, c.batch) for c in CELLS}) == 4 * len(NAMES)
    assert len({(c.family, c.prefill, c.way) for c in CELLS}) == 4 * len(NAMES)


def test_a_format_is_told_from_dense_rows() -> None:
    """Or agreement with the oracle would say nothing."""
    cell = Cell("llama", "affine8", 1, "one-shot", "stock")
    family, text = FAMILIES["llama"], text_of(FAMILIES["llama"])
    model = model_of("llama")
    ours = drive(model, family, kvant.cache_for(model, cell.spec), text, cell.chunks).logits
    dense = drive(model, family, host_cache(model, family), text, cell.chunks).logits
    assert (ours - dense).abs().max() > 100 * TOLERANCE * dense.std()


def test_how_many_cells_are_fused() -> None:
    """Of the cells above, each of which is held to this. `pytest -rP` prints them."""
    cells = Counter((cell.way, reading(cell)) for cell in CELLS)
    for (way, what), count in sorted(cells.items()):
        print(f"{way} models, {what}: {count} cells")
    own = len(OWN_ATTENTION)
    for way, fused, dense in (("stock", 49 - own, 9 + own), ("attached", 55 - own, 3 + own)):
        families = Counter(reading(Cell(name, "raw", 1, "one-shot", way)) for name in NAMES)
        assert families == {"fused": fused, "materialized": dense, "nothing": 4}


def _fused(batch: Batch) -> list[str]:
    """Families that decode with no mask at all, once attached."""
    cells = [Cell(name, "affine8", batch, "chunked", "attached") for name in NAMES]
    return [c.family for c in cells if reading(c) == "fused" and decoding(c, 2).masks == 0]


@pytest.mark.parametrize(
    ("batch", "name"), once([(b, name) for b in BATCHES for name in _fused(b)])
)
def test_no_mask_grows_with_the_context(
    batch: Batch, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once attached, the host makes none at all for a decoded token."""
    made: list[int] = []

    def counted(host: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        def mask(**asked: Any) -> Tensor | None:
            found = host(**asked)
            if found is not None:
                made.append(asked["q_length"])
            return found

        return make_lazy_mask_function(mask)

    names = AttentionMaskInterface._global_mapping
    monkeypatch.setitem(names, "kvant_sdpa", counted(sdpa_mask))
    monkeypatch.setitem(names, "kvant_eager", counted(eager_mask))
    family, text = FAMILIES[name], text_of(FAMILIES[name], batch)
    with handed(model_of(name), "attached", "raw") as model:
        drive(model, family, kvant.cache_for(model, "raw"), text, (13, 11))
    assert 1 not in made
