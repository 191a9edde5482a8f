"""The rotation as the library computes it is that of torch, to the bit, on any instruction set."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kvant.frames import Rotation, hadamard
from kvant.native import Library, library, rotatable, rotation
from kvant.native.library import load

pytestmark = pytest.mark.skipif(
    library().functions is None, reason="the native library is not here"
)
DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 240, 256)
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
dtypes = pytest.mark.parametrize("dtype", list(INTEGERS), ids=str)


@pytest.fixture(scope="module", params=["avx512", "avx2", "plain"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A copy of the library for one instruction set: it is chosen once, when it is loaded."""
    functions = library().functions
    assert functions is not None
    copy = tmp_path_factory.mktemp(request.param) / Path(functions._name).name
    shutil.copy(functions._name, copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVANT_ISA", request.param)
        found = load(copy)
    if found.functions is None:
        pytest.skip(found.reason)
    assert found.isa == request.param
    return found


@pytest.fixture
def every_isa(loaded: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "library", lambda: loaded)


def by_torch(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hadamard, "rotatable", lambda x: False)
        return act(x)


def agree(x: Tensor, threads: tuple[int, ...] = (1,)) -> None:
    assert rotatable(x)
    for act in (Rotation(3).rows, Rotation(3).outputs):
        theirs = by_torch(act, x)
        for count in threads:
            torch.set_num_threads(count)
            ours = act(x)
            torch.set_num_threads(1)
            assert ours.is_contiguous() and ours.dtype == x.dtype and ours.shape == x.shape
            assert torch.equal(bits(ours), bits(theirs))


def bits(x: Tensor) -> Tensor:
    """One NaN is as good as another: torch itself rounds them to different ones."""
    return x.masked_fill(x.isnan(), torch.nan).view(INTEGERS[x.dtype])


def odd_rows(dtype: torch.dtype, dim: int) -> Tensor:
    """Outliers, zeros of both signs, denormals, infinities, NaN, and what is nearly infinite."""
    rows = torch.randn(2, 3, 40, dim)
    rows[0, :, :, 3] *= 300
    rows[0, 0, 5] = 0.0
    rows[0, 0, 6] = -0.0
    rows[0, 1, :, ::3] = -0.0
    rows[0, 2, 7] = 2.5
    rows = (rows * torch.logspace(-3, 3, 40)[:, None]).to(dtype)
    rows[1, 0, 1, 2] = torch.inf
    rows[1, 0, 2, 3:5] = -torch.inf
    rows[1, 0, 3, 1], rows[1, 0, 3, 11] = torch.inf, -torch.inf
    rows[1, 0, 4, 11] = torch.nan
    info = torch.finfo(dtype)
    rows[1, 1] = (torch.randn(40, dim) * info.max / 4).clamp(info.min, info.max)
    rows[1, 1, 0] = 0.0
    rows[1, 1, 0, 9] = info.max
    rows[1, 2] = (torch.randn(40, dim, dtype=torch.float64) * info.tiny).to(dtype)
    rows[1, 2, 0] = info.smallest_normal / 2
    return rows


@dtypes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.usefixtures("every_isa")
def test_rows_are_those_of_torch(dim: int, dtype: torch.dtype) -> None:
    x = odd_rows(dtype, dim)
    assert x[1, 2].count_nonzero() > 0
    agree(x)
    agree(x[:, :, 3:4])
    agree(x[:, :, :0])
    wide = torch.cat([x, x], -1)
    agree(wide[:, 1:, ::2, dim // 2 : dim // 2 + dim])
    agree(x.transpose(1, 2))
    agree(x[:, :1].expand(-1, 4, -1, -1))


@dtypes
@pytest.mark.usefixtures("every_isa")
def test_a_prompt_is_turned_by_any_number_of_threads(dtype: torch.dtype) -> None:
    for dim, heads in ((128, 2), (80, 1)):
        agree(torch.randn(1, 3000, heads, dim).to(dtype).transpose(1, 2), threads=(1, 2, 5))


def test_what_is_not_served_is_left_to_torch() -> None:
    x = torch.randn(1, 2, 3, 64)
    assert rotatable(x)
    others = [x.double(), x[0], x[None], x[..., :20], x[..., ::2], x.to("meta"), x.requires_grad_()]
    others += [torch.randn(1, 1, 1, 272), torch.nn.Parameter(x)]
    assert not any(rotatable(other) for other in others)
    with torch.no_grad():
        assert rotatable(x)


def test_gradients_are_recorded_in_single_precision_too() -> None:
    x = torch.randn(1, 2, 3, 64, requires_grad=True)
    Rotation(1).outputs(Rotation(1).rows(x)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones_like(x), atol=1e-5)


def test_tensors_without_memory_are_left_alone() -> None:
    x = torch.randn(1, 2, 3, 64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Rotation(11).rows(mode.from_tensor(x))
        with pytest.raises(AssertionError, match="a mode whose tensors are not"):
            Rotation(11).rows(x)
    assert fake.shape == x.shape
    assert torch.allclose(Rotation(11).rows(x), Rotation(11).rows(x.double()).float(), atol=1e-5)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_it_is_still_traced_as_one_graph() -> None:
    x = torch.randn(1, 2, 3, 64)
    compiled = torch.compile(Rotation(3).rows, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), Rotation(3).rows(x))
