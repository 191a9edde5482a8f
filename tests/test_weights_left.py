"""Test linear layers that stay dense, and why: the same whether or not the processor packs any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kvant
from kvant.weights import packed_matrix

IN, OUT = 96, 128


class Linear(nn.Linear):
    """A subclass, since other computations have their own class."""


def wrap_layer(layer: nn.Linear, **changes: Any) -> nn.Module:
    model = nn.Module()
    model.layer = layer
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def make_tied() -> nn.Module:
    layer, words = nn.Linear(IN, OUT).bfloat16(), nn.Embedding(OUT, IN).bfloat16()
    layer.weight = words.weight
    return wrap_layer(layer, words=words)


def make_shared_memory() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    return wrap_layer(layer, other=nn.Parameter(layer.weight.detach()))


def make_parametrized() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return wrap_layer(layer)


def make_mamba() -> nn.Module:
    model = nn.Module()
    model.dt_proj = nn.Linear(IN, OUT).bfloat16()
    return model


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (make_tied, "1 tied"),
    "one memory": (make_shared_memory, "1 tied"),
    "float32": (lambda: wrap_layer(nn.Linear(IN, OUT)), "1 of float32"),
    "another class": (lambda: wrap_layer(Linear(IN, OUT).bfloat16()), "1 of class Linear"),
    "parametrized": (make_parametrized, "1 of class ParametrizedLinear"),
    "meta": (lambda: wrap_layer(nn.Linear(IN, OUT, device="meta").bfloat16()), "1 on meta"),
    "small": (lambda: wrap_layer(nn.Linear(IN, 2).bfloat16()), "1 too small"),
    "no rows": (lambda: wrap_layer(nn.Linear(IN, 0).bfloat16()), "1 too small"),
    "read": (make_mamba, "1 read by other code"),
    "mixed": (lambda: wrap_layer(make_mixed()), "1 with a bias that oneDNN does not read"),
}


def make_mixed() -> nn.Linear:
    layer = nn.Linear(IN, OUT, dtype=torch.bfloat16)
    layer.bias = nn.Parameter(torch.zeros(OUT, dtype=torch.float64))
    return layer


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", LEFT)
def test_other_layers_stay_dense_with_a_reason(name: str) -> None:
    build, reason = LEFT[name]
    model = build()
    before = list(model.parameters())
    packing = kvant.pack(model)
    assert not packing.layers and packing.nbytes == 0 and len(packing.left) == 1
    assert str(packing) == f"0 linear layers packed, 0 B; left: {reason}"
    assert all(
        parameter is other for parameter, other in zip(before, model.parameters(), strict=True)
    )


def test_packing_needs_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrix, "_LINEAR_OP", None)
    model = wrap_layer(nn.Linear(IN, OUT).bfloat16())
    assert set(kvant.pack(model).left.values()) == {f"unknown to torch {torch.__version__}"}
    assert type(model.layer.weight) is nn.Parameter


def test_packing_needs_processor_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: Tensor, rows: int | None) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(packed_matrix, "_REORDER_OP", refuse)
    model = wrap_layer(nn.Linear(IN, OUT).bfloat16())
    assert set(kvant.pack(model).left.values()) == {"refused by oneDNN"}
    assert type(model.layer.weight) is nn.Parameter


@pytest.mark.parametrize("verb", [kvant.pack, kvant.unpack])
def test_invalid_model_is_refused(verb: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="str is no model: a loaded"):
        verb("Qwen/Qwen3-0.6B")
