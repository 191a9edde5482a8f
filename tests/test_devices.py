"""Test devices and dtypes by name on a simulated machine."""

from __future__ import annotations

import pytest
import torch

import kvant
from kvant.native import get_library
from kvant.platform import devices
from kvant.platform.devices import (
    describe_slow_weights,
    is_slow,
    parse_device,
    parse_dtype,
    warn_of_slow_weights,
)

BF16 = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_gpu_is_chosen_if_available(gpus: None) -> None:
    names = (None, "cpu", "cuda", "cuda:1")
    assert [str(parse_device(name)) for name in names] == ["cuda", "cpu", "cuda", "cuda:1"]


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_cpu_is_chosen_otherwise(gpus: None) -> None:
    assert parse_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "name", "message"),
    [
        (0, "tpu", "known are cpu, cuda, cuda:N, mps"),
        (0, "cuda", "torch .* finds no GPU here; there is cpu: install"),
        (0, "mps", "here there is cpu"),
        (2, "cuda:2", "here there is cpu, cuda:0, cuda:1"),
        (2, "cuda:x", "known are cpu, cuda, cuda:N, mps"),
    ],
    indirect=["gpus"],
)
def test_missing_device_is_refused_with_the_available_ones(
    gpus: None, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"--device {name}: {message}"):
        parse_device(name)


def test_dtypes_have_names() -> None:
    assert parse_dtype("float16") == torch.float16
    assert parse_dtype() == "auto"
    with pytest.raises(
        ValueError, match="--dtype int8: known are auto, float32, bfloat16, float16"
    ):
        parse_dtype("int8")


def test_only_16_bit_dtypes_on_a_cpu_can_be_slow() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert not is_slow(dtype, torch.device("cuda"))
    assert not is_slow(torch.float32, torch.device("cpu"))


def test_unknown_dtype_support_counts_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "SUPPORT_OPERATORS", {"bfloat16": "_no_such_operator"})
    assert not is_slow(torch.bfloat16, torch.device("cpu"))


def test_slow_weights_are_reported_with_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_slow", lambda dtype, device: dtype == torch.bfloat16)
    line = describe_slow_weights(torch.nn.Sequential(BF16, torch.nn.Linear(64, 64, bias=False)))
    assert line is not None and "bfloat16" in line and "\n" not in line
    assert "with which weights take 32 KiB instead of 24 KiB" in line
    assert describe_slow_weights(torch.nn.Linear(64, 64)) is None


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_rounded_weights_count_as_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_slow", lambda dtype, device: dtype == torch.bfloat16)
    rounded = torch.nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)
    model = torch.nn.Sequential(rounded, BF16)
    kvant.pack(model, {"0": "affine8"})
    assert "take 34 KiB instead of 26 KiB" in str(describe_slow_weights(model))


def test_packed_weights_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_slow", lambda dtype, device: dtype == torch.bfloat16)
    model = torch.nn.Linear(128, 128).bfloat16()
    before = describe_slow_weights(model)
    if kvant.pack(model).layers:
        assert before is not None and describe_slow_weights(model) is None


def test_model_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_slow", lambda dtype, device: dtype == torch.bfloat16)
    lines: list[str] = []
    for model in (BF16, BF16, torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16()):
        warn_of_slow_weights(model, lines.append)
    assert len(lines) == 2
