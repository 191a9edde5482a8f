"""Devices and dtypes by name; the machine is made up, so that it has any."""

from __future__ import annotations

import pytest
import torch

from kvant.devices import named_device, named_dtype


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_gpu_is_taken_where_there_is_one(gpus: None) -> None:
    names = (None, "cpu", "cuda", "cuda:1")
    assert [str(named_device(name)) for name in names] == ["cuda", "cpu", "cuda", "cuda:1"]


@pytest.mark.parametrize("gpus", [0], indirect=True)
def test_else_the_cpu(gpus: None) -> None:
    assert named_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "name", "told"),
    [
        (0, "tpu", "known are cpu, cuda, cuda:N, mps; here there is cpu"),
        (0, "cuda", "torch .* finds no GPU here; there is cpu: install"),
        (0, "mps", "here there is cpu"),
        (2, "cuda:2", "here there is cpu, cuda:0, cuda:1"),
        (2, "cuda:x", "known are cpu, cuda, cuda:N, mps; here there is cpu, cuda:0, cuda:1"),
    ],
    indirect=["gpus"],
)
def test_what_is_not_there_is_refused_with_what_is(gpus: None, name: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"--device {name}: {told}"):
        named_device(name)


def test_dtypes_have_names() -> None:
    assert named_dtype("float16") == torch.float16
    assert named_dtype() == "auto"
    with pytest.raises(
        ValueError, match="--dtype int8: known are auto, float32, bfloat16, float16"
    ):
        named_dtype("int8")
