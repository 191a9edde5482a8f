"""Test the rotation kernel against torch, to the bit, on any device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attention.kernels import DEVICE, GPU, needed
from frames.turned import dtypes, make_hard_rows, rotate_with_torch, to_bits
from kvant.codecs.frames import Rotation, hadamard
from kvant.codecs.frames.hadamard import can_launch

pytestmark = [
    needed,
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DIMS = (16, 48, 80, 128, 240, 256)


@pytest.fixture(autouse=True)
def launched_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the results of kernels; on the CPU they run where a GPU would be used."""
    dtypes = []

    def count_launch(*args: object, **options: object) -> Tensor:
        out: Tensor = launched(*args, **options)  # type: ignore[arg-type]
        dtypes.append(out.dtype)
        return out

    launched = hadamard.launch_rotation
    monkeypatch.setattr(hadamard, "launch_rotation", count_launch)
    if not GPU:
        monkeypatch.setattr(hadamard, "can_launch", lambda x: True)
    return dtypes


@pytest.fixture(autouse=True)
def gpu_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate bfloat16 rounding: the interpreter truncates and has no subnormal numbers."""

    def convert(data: Any, source: Any, *_: object) -> Any:
        x = torch.from_numpy(data)
        if source.is_bf16():
            return (x.to(torch.int32) << 16).numpy().view("uint32")
        return x.bfloat16().view(torch.uint16).numpy()

    if not GPU:
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", convert)


def assert_same_as_torch(x: Tensor) -> None:
    rotation, on_device = Rotation(3), x.to(DEVICE)
    for act in (rotation.transform_rows, rotation.restore_outputs, rotation.transform_queries):
        ours, theirs = act(on_device), rotate_with_torch(act, x.cpu())
        assert ours.is_contiguous() and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(to_bits(ours.cpu()), to_bits(theirs))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_rows_equal_those_of_torch(dim: int, dtype: torch.dtype) -> None:
    assert_same_as_torch(make_hard_rows(dtype, dim)[:, :, :11])


@pytest.mark.parametrize("count", [0, 1, 6])
def test_rows_may_have_any_strides(count: int) -> None:
    x = torch.randn(2, 3, count, 96).to(DEVICE)
    for rows in (
        torch.cat([x, x], -1)[:, 1:, ::2, 48:144],
        x.transpose(1, 2),
        x[:, :1].expand(-1, 4, -1, -1),
    ):
        assert all(
            torch.equal(act(rows), act(rows.contiguous()))
            for act in (Rotation(3).transform_rows, Rotation(3).restore_outputs)
        )
        assert_same_as_torch(rows)


@dtypes
def test_each_rotation_is_one_launch(
    dtype: torch.dtype, launched_dtypes: list[torch.dtype]
) -> None:
    x = torch.randn(1, 2, 1, 64).to(DEVICE, dtype)
    Rotation(3).transform_rows(x)
    Rotation(3).restore_outputs(x)
    Rotation(3).transform_queries(x)
    assert launched_dtypes == [dtype, dtype, torch.float32]


def test_nothing_is_cached_from_fake_or_meta_tensors() -> None:
    x = torch.randn(1, 2, 3, 64).to(DEVICE, torch.bfloat16)
    # On a GPU the rows are left to torch; here the kernel is forced to run.
    message = "outputs without storage"
    refused = nullcontext() if GPU else pytest.raises(AssertionError, match=message)
    with FakeTensorMode(allow_non_fake_inputs=True), refused:
        Rotation(12).transform_rows(x)
    assert type(Rotation(12).transform_rows(x)) is Tensor


def test_tensors_on_other_devices_are_left_to_torch() -> None:
    x = torch.randn(1, 2, 3, 64)
    assert not can_launch(x) and not can_launch(x.to("meta"))


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_unsupported_rows_are_left_to_torch() -> None:
    x = torch.randn(1, 2, 3, 64, device=DEVICE)
    assert can_launch(x)
    unsupported = [x.double(), x[0], x[None], x[..., :20], x[..., ::2], torch.nn.Parameter(x)]
    unsupported += [torch.randn(1, 1, 1, 272, device=DEVICE), x.clone().requires_grad_()]
    assert not any(can_launch(other) for other in unsupported)
    with torch.no_grad():
        assert can_launch(unsupported[-1])


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_a_launch_can_be_captured() -> None:
    x = torch.randn(1, 2, 1, 64, device=DEVICE)
    Rotation(3).transform_rows(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = Rotation(3).transform_rows(x)
    x.neg_()
    graph.replay()
    assert torch.equal(out, Rotation(3).transform_rows(x))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_rotation_still_traces_to_one_graph(launched_dtypes: list[torch.dtype]) -> None:
    x = torch.randn(1, 2, 3, 64, device=DEVICE)
    compiled = torch.compile(Rotation(3).transform_rows, backend="eager", fullgraph=True)
    traced = compiled(x)
    assert not launched_dtypes
    assert torch.equal(traced, Rotation(3).transform_rows(x))
