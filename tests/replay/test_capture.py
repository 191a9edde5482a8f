"""Test captured and replayed forwards: the same bits, in reused memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kvant
from kvant.codecs.frames import Rotation, hadamard
from kvant.errors import UnsupportedView
from kvant.native import (
    DTYPE_CODES,
    NativeRequest,
    capture_requests,
    check_refusal,
    compile_requests,
    get_library,
    map_elements,
    norm_rows,
)
from kvant.replay.capture import Capture, ReplayBuffers, capture_forward, capture_graph

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
SHAPES = ((3,), (2, 5), (1, 16), (2, 3, 4, 48), (4, 1, 3, 65))


def make_odd_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers of every magnitude, including ends of ranges."""
    x = torch.randn(shape) * torch.tensor(10.0) ** torch.randint(-42, 38, shape)
    flat = x.reshape(-1)
    for position, value in enumerate((0.0, -0.0, float("inf"), 1e-40, -65504.0)):
        flat[position % flat.numel()] = value
    return x.to(dtype)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether tensors are equal to the bit, with equal NaNs."""
    nan = first.isnan() & second.isnan()
    ints = {2: torch.int16, 4: torch.int32}[first.itemsize]
    return bool((nan | (first.contiguous().view(ints) == second.contiguous().view(ints))).all())


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scalar_functions_match_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = make_odd_numbers(shape, dtype), make_odd_numbers(shape, dtype)
    narrow = make_odd_numbers((*shape[:-1], 1), dtype).expand(shape)
    cases: list[tuple[str, Tensor, Tensor | None, Tensor]] = [
        ("copy", a, None, a),
        ("negate", a, None, -a),
        ("add", a, b, a + b),
        ("multiply", a, b, a * b),
        ("multiply", narrow, b, narrow * b),
        ("add", a.flip(-1), narrow, a.flip(-1) + narrow),
    ]
    if len(shape) > 1:
        turned = b.transpose(0, -1).contiguous().transpose(0, -1)
        cases.append(("add", a, turned, a + turned))
    for operation, x, y, expected in cases:
        wide_rows = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)
        for out in (torch.zeros(shape, dtype=dtype), wide_rows[..., ::2]):
            map_elements(operation, out, x, y)
            assert same_bits(out, expected), operation


def test_16_bit_function_is_a_lookup_table() -> None:
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    table, out = functional.silu(every), torch.zeros(2**16, dtype=torch.bfloat16)
    map_elements("look_up", out, every, table)
    assert same_bits(out, table)


def test_program_runs_once_per_call() -> None:
    x, weight, requests = torch.randn(1, 64), torch.ones(64), list[NativeRequest]()
    with capture_requests(requests.append):
        out = norm_rows(x, weight, 1e-6)
        map_elements("add", x, x, out)
    program, other = compile_requests(requests), torch.randn(1, 64)
    x.copy_(other)
    check_refusal(program())
    assert torch.equal(x, other + norm_rows(other, weight, 1e-6))


def test_refusal_of_a_step_raises() -> None:
    with pytest.raises(RuntimeError, match="shape: below zero"):
        check_refusal(compile_requests([("map", b"\xff" * 200, ())])())
    with pytest.raises(RuntimeError, match="request: less than"):
        check_refusal(compile_requests([("map", b"", ())])())


class Layer(nn.Module):
    """The operations of a model layer on a token, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(96, 160, bias=False), nn.Linear(96, 160)
        self.down = nn.Linear(160, 96)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.cat((-x[..., 48:], x[..., :48]), -1)
        x = x * 2 + half.sigmoid() * x.softmax(-1)
        out = self.down(functional.silu(self.gate(x)) * self.up(x))
        out = out.view(*out.shape[:-1], 4, 24).transpose(1, 2).reshape(*out.shape)
        out += x
        return out.to(torch.float32).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPE_CODES)
@pytest.mark.parametrize("packed", [False, True])
def test_replayed_forward_gives_the_same_output(dtype: torch.dtype, packed: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(4))).to(dtype)
    if packed:
        kvant.pack(layers)
    x = torch.randn(2, 3, 96).to(dtype)
    with torch.no_grad():
        layers(x)  # runs once when probed
        replay = capture_forward(layers, x)
        for _ in range(3):
            x.copy_(torch.randn(2, 3, 96))
            expected = layers(x.clone())
            gc.collect()
            assert same_bits(replay(x), expected)


def test_buffers_are_reused_once_unreferenced() -> None:
    layers = nn.Sequential(*(Layer() for _ in range(20))).bfloat16()
    x = torch.randn(1, 1, 96).bfloat16()
    recording = Capture((x,), ReplayBuffers())
    with torch.no_grad(), recording, capture_requests(recording.add_request):
        layers(x)
    assert len(recording._buffers._by_storage) < 30 < len(recording._steps)


@pytest.mark.parametrize(
    "read_value",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * x.tolist()[0],
        lambda x: x * float(x.numpy()[0]),
        lambda x: x * float(np.asarray(x)[0]),
    ],
)
def test_forward_that_reads_a_value_is_refused(read_value: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UnsupportedView, match="reads the value"):
        capture_forward(read_value, torch.randn(4))


def test_reallocated_result_is_not_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result is compared with the table's; if it differs the operator is called."""
    wrong = torch.zeros(2**16, dtype=torch.bfloat16)
    monkeypatch.setattr("kvant.replay.capture._tabulate_results", lambda *args: wrong)
    x = torch.randn(5).bfloat16()
    replay = capture_forward(functional.silu, x)
    x.copy_(torch.randn(5))
    assert torch.equal(replay(x), functional.silu(x))


def test_modified_constant_is_recreated() -> None:
    def forward(x: Tensor) -> Tensor:
        total = torch.tensor([1.0, 2.0])
        total += x
        return total * 2

    x = torch.tensor([3.0, 4.0])
    replay = capture_forward(forward, x)
    for _ in range(3):
        assert torch.equal(replay(x), torch.tensor([8.0, 12.0]))


def test_operands_of_two_dtypes_use_the_operator() -> None:
    first, second = torch.ones(4).bfloat16(), torch.ones(4)
    replay = capture_forward(lambda x, y: torch.cat((x, y.half(), x)), first, second)
    second.fill_(3)
    assert torch.equal(replay(first, second)[4:8], torch.full((4,), 3.0).to(replay.out.dtype))


def test_tensors_of_a_request_stay_alive() -> None:
    """The signs of a rotation are in a bounded cache."""
    x = torch.randn(1, 1, 1, 32)
    replay = capture_forward(lambda x: Rotation(5).transform_rows(x), x)
    expected = Rotation(5).transform_rows(x)
    hadamard._make_native_signs.cache_clear()
    gc.collect()
    assert torch.equal(replay(x), expected)


def test_calls_of_other_threads_are_not_captured() -> None:
    from threading import Thread

    names = list[str]()
    with capture_requests(lambda request: names.append(request[0])):
        other = Thread(target=norm_rows, args=(torch.randn(1, 64), torch.ones(64), 1e-6))
        other.start()
        other.join()
        norm_rows(torch.randn(1, 64), torch.ones(64), 1e-6)
    assert names == ["norm"]


def test_failed_graph_capture_leaves_the_synchronization_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch warns of the mode after setting it; a warning may be an error."""
    modes: list[Any] = [0]

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    def synchronize(ids: Tensor, lengths: Tensor) -> Tensor:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            capture_graph(synchronize, torch.zeros(1), torch.zeros(1))
    assert modes == [0, "error", 0]
