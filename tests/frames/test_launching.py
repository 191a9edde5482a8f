"""The rotation as a kernel computes it is that of torch, to the bit, on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from attention.kernels import DEVICE, GPU, needed
from frames.turned import bits, by_torch, dtypes, odd_rows
from kvant.codecs.frames import Rotation, hadamard
from kvant.codecs.frames.hadamard import can_launch

pytestmark = [
    needed,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
]
DIMS = (16, 48, 80, 128, 240, 256)


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """What kernels gave; on the CPU they run where a GPU would be asked for."""
    found = []

    def counted(*args: object, **options: object) -> Tensor:
        out: Tensor = launched(*args, **options)  # type: ignore[arg-type]
        found.append(out.dtype)
        return out

    launched = hadamard.launch_rotation
    monkeypatch.setattr(hadamard, "launch_rotation", counted)
    if not GPU:
        monkeypatch.setattr(hadamard, "can_launch", lambda x: True)
    return found


@pytest.fixture(autouse=True)
def bfloat16_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts off what a bfloat16 does not hold, and has no subnormal ones."""

    def converted(data: Any, source: Any, *_: object) -> Any:
        x = torch.from_numpy(data)
        if source.is_bf16():
            return (x.to(torch.int32) << 16).numpy().view("uint32")
        return x.bfloat16().view(torch.uint16).numpy()

    if not GPU:
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", converted)


def agree(x: Tensor) -> None:
    rotation, there = Rotation(3), x.to(DEVICE)
    for act in (rotation.transform_rows, rotation.restore_outputs, rotation.transform_queries):
        ours, theirs = act(there), by_torch(act, x)
        assert ours.is_contiguous() and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(bits(ours.cpu()), bits(theirs))


@dtypes
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_those_of_torch(dim: int, dtype: torch.dtype) -> None:
    agree(odd_rows(dtype, dim)[:, :, :11])


@pytest.mark.parametrize("count", [0, 1, 6])
def test_rows_lie_anyhow(count: int) -> None:
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
        agree(rows)


@dtypes
def test_each_takes_one_launch(dtype: torch.dtype, launches: list[torch.dtype]) -> None:
    x = torch.randn(1, 2, 1, 64).to(DEVICE, dtype)
    Rotation(3).transform_rows(x)
    Rotation(3).restore_outputs(x)
    Rotation(3).transform_queries(x)
    assert launches == [dtype, dtype, torch.float32]


def test_nothing_is_kept_of_a_mode_whose_tensors_have_no_memory() -> None:
    x = torch.randn(1, 2, 3, 64).to(DEVICE, torch.bfloat16)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(AssertionError, match="a mode whose tensors are not"),
    ):
        Rotation(12).transform_rows(x)
    assert type(Rotation(12).transform_rows(x)) is Tensor


def test_what_lies_elsewhere_is_left_to_others() -> None:
    x = torch.randn(1, 2, 3, 64)
    assert not can_launch(x) and not can_launch(x.to("meta"))


@pytest.mark.skipif(not GPU, reason="there is no GPU")
def test_what_is_not_served_is_left_to_torch() -> None:
    x = torch.randn(1, 2, 3, 64, device=DEVICE)
    assert can_launch(x)
    others = [x.double(), x[0], x[None], x[..., :20], x[..., ::2], torch.nn.Parameter(x)]
    others += [torch.randn(1, 1, 1, 272, device=DEVICE), x.clone().requires_grad_()]
    assert not any(can_launch(other) for other in others)
    with torch.no_grad():
        assert can_launch(others[-1])


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
def test_it_is_still_traced_as_one_graph(launches: list[torch.dtype]) -> None:
    x = torch.randn(1, 2, 3, 64, device=DEVICE)
    compiled = torch.compile(Rotation(3).transform_rows, backend="eager", fullgraph=True)
    traced = compiled(x)
    assert not launches
    assert torch.equal(traced, Rotation(3).transform_rows(x))
