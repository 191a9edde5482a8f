"""Test that a codec of twenty lines outside the package works wherever the built-in ones do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvant import Cache, attend, load, plan, register_codec, save
from kvant.planner import Shape
from kvant.types import Codec, Field, Fields, Identity
from laws import oracle


@dataclass(frozen=True)
class Thirds(Codec):
    """Int8 steps of the largest value that a *page* has in each channel: not per row."""

    name: ClassVar[str] = "thirds"
    frame = Identity()

    def fields(self, dim: int) -> Mapping[str, Field]:
        return {
            "steps": Field(torch.int8, dim),
            "top": Field(torch.float32, dim, per_page=True),
        }

    def seal(self, rows: Tensor) -> Fields:
        top = rows.float().abs().amax(-2, keepdim=True).clamp_min(1e-30)
        return {"steps": (rows.float() / top * 127).round().to(torch.int8), "top": top}

    def open(self, fields: Fields) -> Tensor:
        return fields["steps"].float() * fields["top"] / 127


@pytest.fixture(autouse=True)
def registered_codec() -> None:
    register_codec("thirds", Thirds)


SPECS = (
    "thirds",
    "thirds/affine4",
    "raw/thirds,tail=5",
    "thirds,window=70,sinks=4",
    "thirds,sinks=2,capacity=300,prefill=stored",
)


@pytest.mark.parametrize("spec", SPECS)
def test_foreign_codec_is_stored_read_forked_and_saved(spec: str, tmp_path: Path) -> None:
    cache = Cache(1, spec)
    keys, values = torch.randn(2, 2, 2, 250, 16).unbind()
    cache[0].append(keys[:, :, :230], values[:, :, :230])
    for t in range(230, 250):
        cache[0].append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    q = torch.randn(2, 4, 1, 16)
    expected_rows = oracle.visible_rows(cache.spec.layers[0], keys, values, [0, 0], 249, 250)
    expected = oracle.exact_attention(q, *expected_rows)
    save(cache, tmp_path / "thirds.kv")
    restored = Cache(1, spec)
    restored.restore(cache.snapshot())
    for copy in (cache, cache.fork(), restored, load(tmp_path / "thirds.kv")):
        assert (attend(q, copy[0].view()) - expected).abs().max() < 1e-5
        copy.rewind(240)
        assert copy.length == 240
    assert cache.nbytes <= plan_nbytes(spec, 250)
    single = Cache(1, spec)
    for t in range(150):
        single[0].append(keys[:, :, t : t + 1], values[:, :, t : t + 1])
    assert single.nbytes == plan_nbytes(spec, 150)


def plan_nbytes(spec: str, context: int) -> int:
    return plan(Shape(1, 2, 16, 16, torch.float32), spec, context=context, sequences=2).nbytes
