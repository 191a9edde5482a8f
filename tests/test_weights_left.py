"""Test linear layers that stay unpacked, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import kvant
from kvant.native import NativeLibrary
from kvant.weights import packed_matrix
from kvant.weights.packing import count_weight_nbytes

IN, OUT = 96, 128


class Linear(nn.Linear):
    """A subclass, since other computations have their own class."""


def wrap_layer(layer: nn.Module, **changes: Any) -> nn.Module:
    model = nn.Module()
    model.layer = layer
    for name, value in changes.items():
        setattr(model, name, value)
    return model


def make_shared_memory() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    model = wrap_layer(layer)
    model.register_buffer("other", layer.weight.detach())
    return model


def make_parametrized() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return wrap_layer(layer)


def make_mamba() -> nn.Module:
    model = nn.Module()
    model.dt_proj = nn.Linear(IN, OUT).bfloat16()
    return model


def make_turned() -> nn.Module:
    layer = nn.Linear(IN, OUT).bfloat16()
    layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    return wrap_layer(layer)


LEFT: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "one memory": (make_shared_memory, "affine8", "1 sharing its memory"),
    "float32": (lambda: wrap_layer(nn.Linear(IN, OUT)), "raw", "1 of float32"),
    "float64": (lambda: wrap_layer(nn.Linear(IN, OUT).double()), "affine8", "1 of float64"),
    "another class": (
        lambda: wrap_layer(Linear(IN, OUT).bfloat16()),
        "raw",
        "1 of class Linear",
    ),
    "parametrized": (
        make_parametrized,
        "raw",
        "1 of class ParametrizedLinear, 1 of class ParametrizationList",
    ),
    "meta": (lambda: wrap_layer(nn.Linear(IN, OUT, device="meta").bfloat16()), "raw", "1 on meta"),
    "small": (lambda: wrap_layer(nn.Linear(IN, 2).bfloat16()), "affine4", "1 too small"),
    "no rows": (lambda: wrap_layer(nn.Linear(IN, 0).bfloat16()), "raw", "1 too small"),
    "width": (
        lambda: wrap_layer(nn.Linear(100, OUT).bfloat16()),
        "affine4",
        "1 of a width that is no multiple of 32",
    ),
    "embedding": (
        lambda: wrap_layer(nn.Embedding(OUT, 100)),
        "affine4",
        "1 of a width that is no multiple of 32",
    ),
    "turned": (make_turned, "raw", "1 not contiguous"),
    "read": (make_mamba, "raw", "1 read by other code"),
}


def test_matrices_of_other_modules_are_listed() -> None:
    model = wrap_layer(nn.Linear(IN, OUT).bfloat16())
    model.conv = nn.Conv1d(64, 64, 4)
    model.experts = nn.Parameter(torch.zeros(4, 64, 64))
    model.small = nn.Parameter(torch.zeros(4, 4))
    packing = kvant.pack(model)
    assert packing.left == {"experts": "of class Module", "conv.weight": "of class Conv1d"}
    assert str(packing).endswith("left: 1 of class Module, 1 of class Conv1d")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", LEFT)
def test_other_layers_stay_dense_with_a_reason(name: str) -> None:
    build, format_name, reason = LEFT[name]
    model = build()
    before = list(model.parameters())
    packing = kvant.pack(model, format_name)
    assert not packing.layers and packing.nbytes == 0
    assert str(packing) == f"0 layers packed, 0 B; left: {reason}"
    assert all(
        parameter is other for parameter, other in zip(before, model.parameters(), strict=True)
    )


def test_weight_of_another_module_outlives_rounding_of_a_packed_model() -> None:
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    model = wrap_layer(layer, other=nn.ParameterList([layer.weight]))
    values = layer.weight.detach().clone()
    kvant.pack(model)
    assert count_weight_nbytes(model, "affine8") == values.nbytes
    left = kvant.pack(model, "affine8").left
    assert left == {"layer": "sharing its memory", "other.0": "of class ParameterList"}
    assert torch.equal(model.other[0], values)


def test_packing_needs_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = NativeLibrary(None, reason="it was not built")
    monkeypatch.setattr(packed_matrix, "get_library", lambda: missing)
    model = wrap_layer(nn.Linear(IN, OUT).bfloat16())
    assert set(kvant.pack(model).left.values()) == {"without the native library"}
    assert type(model.layer.weight) is nn.Parameter


@pytest.mark.parametrize("verb", [kvant.pack, kvant.unpack])
def test_invalid_model_is_refused(verb: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="str is no model: a loaded"):
        verb("Qwen/Qwen3-0.6B")
