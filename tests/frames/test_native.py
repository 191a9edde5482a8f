"""The rotation as the library computes it is that of torch, to the bit, on any instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from frames.turned import bits, by_torch, dtypes, odd_rows
from isas import ISAS, loaded_for
from kvant import native
from kvant.codecs.frames import Rotation
from kvant.native import NativeLibrary, can_rotate, get_library

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 240, 256)


@pytest.fixture(scope="module", params=ISAS)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> NativeLibrary:
    return loaded_for(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def every_isa(loaded: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "get_library", lambda: loaded)


def agree(x: Tensor, threads: tuple[int, ...] = (1,)) -> None:
    assert can_rotate(x)
    for act in (Rotation(3).transform_rows, Rotation(3).restore_outputs):
        theirs = by_torch(act, x)
        for count in threads:
            torch.set_num_threads(count)
            ours = act(x)
            torch.set_num_threads(1)
            assert ours.is_contiguous() and ours.dtype == x.dtype and ours.shape == x.shape
            assert torch.equal(bits(ours), bits(theirs))


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
    assert can_rotate(x)
    others = [x.double(), x[0], x[None], x[..., :20], x[..., ::2], x.to("meta"), x.requires_grad_()]
    others += [torch.randn(1, 1, 1, 272), torch.nn.Parameter(x)]
    assert not any(can_rotate(other) for other in others)
    with torch.no_grad():
        assert can_rotate(x)


def test_gradients_are_recorded_in_single_precision_too() -> None:
    x = torch.randn(1, 2, 3, 64, requires_grad=True)
    Rotation(1).restore_outputs(Rotation(1).transform_rows(x)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, torch.ones_like(x), atol=1e-5)


def test_tensors_without_memory_are_left_alone() -> None:
    x = torch.randn(1, 2, 3, 64)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = Rotation(11).transform_rows(mode.from_tensor(x))
        real = Rotation(11).transform_rows(
            x
        )  # whose result has no memory that a kernel could write
    assert type(fake) is type(real) is FakeTensor and fake.shape == real.shape == x.shape
    assert torch.allclose(
        Rotation(11).transform_rows(x), Rotation(11).transform_rows(x.double()).float(), atol=1e-5
    )


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_it_is_still_traced_as_one_graph() -> None:
    x = torch.randn(1, 2, 3, 64)
    compiled = torch.compile(Rotation(3).transform_rows, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), Rotation(3).transform_rows(x))
