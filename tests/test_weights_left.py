"""Linear layers that are left unpacked, and why: the same whether the processor packs any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import kvant
from kvant import packed_matrix

IN, OUT = 96, 128


class Linear(nn.Linear):
    """What computes otherwise has a class of its own."""


def hold(layer: nn.Linear, **changes: Any) -> nn.Module:
    model = nn.Module()
    model.layer = layer
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def tied() -> nn.Module:
    layer, words = nn.Linear(IN, OUT).bfloat16(), nn.Embedding(OUT, IN).bfloat16()
    layer.weight = words.weight
    return hold(layer, words=words)


def one_memory() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    return hold(layer, other=nn.Parameter(layer.weight.detach()))


def parametrized() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return hold(layer)


def mamba() -> nn.Module:
    model = nn.Module()
    model.dt_proj = nn.Linear(IN, OUT).bfloat16()
    return model


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tied": (tied, "1 tied"),
    "one memory": (one_memory, "1 tied"),
    "float32": (lambda: hold(nn.Linear(IN, OUT)), "1 of float32"),
    "another class": (lambda: hold(Linear(IN, OUT).bfloat16()), "1 of class Linear"),
    "parametrized": (parametrized, "1 of class ParametrizedLinear"),
    "meta": (lambda: hold(nn.Linear(IN, OUT, device="meta").bfloat16()), "1 on meta"),
    "small": (lambda: hold(nn.Linear(IN, 2).bfloat16()), "1 too small"),
    "no rows": (lambda: hold(nn.Linear(IN, 0).bfloat16()), "1 too small"),
    "read": (mamba, "1 read by other code"),
    "mixed": (lambda: hold(mixed()), "1 with a bias that oneDNN does not read"),
}


def mixed() -> nn.Linear:
    layer = nn.Linear(IN, OUT, dtype=torch.bfloat16)
    layer.bias = nn.Parameter(torch.zeros(OUT, dtype=torch.float64))
    return layer


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", LEFT)
def test_other_layers_are_left_and_it_is_said_why(name: str) -> None:
    build, why = LEFT[name]
    model = build()
    before = list(model.parameters())
    told = kvant.pack(model)
    assert not told.layers and told.nbytes == 0 and len(told.left) == 1
    assert str(told) == f"0 linear layers packed, 0 B; left: {why}"
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_nothing_is_packed_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_matrix, "_LINEAR_OP", None)
    model = hold(nn.Linear(IN, OUT).bfloat16())
    assert set(kvant.pack(model).left.values()) == {f"unknown to torch {torch.__version__}"}
    assert type(model.layer.weight) is nn.Parameter


def test_nothing_is_packed_where_the_processor_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: Tensor, rows: int | None) -> Tensor:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(packed_matrix, "_REORDER_OP", refuse)
    model = hold(nn.Linear(IN, OUT).bfloat16())
    assert set(kvant.pack(model).left.values()) == {"refused by oneDNN"}
    assert type(model.layer.weight) is nn.Parameter


@pytest.mark.parametrize("verb", [kvant.pack, kvant.unpack])
def test_what_is_no_model_is_refused(verb: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="str is no model: a loaded"):
        verb("Qwen/Qwen3-0.6B")
