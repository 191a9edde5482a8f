"""Test that a GPU benchmark allocates on the GPU only, with fake tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvant.bench import attend, cache_race
from kvant.bench.attend import make_gpu_attention
from kvant.bench.harness import CudaDevice

SIZES = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "head_dim": 32}
TASK = attend.AttendTask(batch=2, heads=2, group=2, dim=32, queries=1, repeats=3, backend=None)


class FakeGpu(CudaDevice):
    """A GPU without memory: its tensors do not mix with those of the CPU."""

    name = "meta"


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch, stream_log: list[str]) -> None:
    class Generator(torch.Generator):
        """A stand-in: fake tensors have no generator."""

        def __new__(cls, device: str = "cpu") -> Generator:
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    properties = SimpleNamespace(L2_cache_size=200_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: properties)


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_runs_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, stream_log: list[str], queries: int
) -> None:
    def read(q: Any, view: Any, backend: Any) -> None:
        assert {q.device.type, view.keys.open.device.type} == {"meta"}

    monkeypatch.setattr(attend, "attend", read)
    monkeypatch.setattr(attend, "explain", lambda view: SimpleNamespace(backend="triton"))
    monkeypatch.setattr(
        attend,
        "make_gpu_attention",
        lambda *a: make_gpu_attention(*a, lambda flex, **options: flex),
    )
    task = attend.AttendTask(**vars(TASK) | {"queries": queries})
    rows, skipped = attend.measure_attention(640, ["affine8"], task, FakeGpu())
    backends = ["torch gqa", "torch folded", "torch by hand", "torch flash"]
    passes = ["stream"] if queries == 1 else ["stream", "matmul"]
    assert [row["way"] for row in rows] == [*backends, *passes, "raw", "affine8"]
    # of the fake device
    assert [line.split(",")[:2] for line in skipped] == [["640 rows", " torch flex: ValueError"]]
    assert all(row["median_ms"] == 250.0 and "host_ms" in row for row in rows)
    assert stream_log.count("hold") == TASK.repeats + 1


@pytest.mark.parametrize("baseline", ["dynamic", "static"])
def test_decode_runs_on_the_gpu(stream_log: list[str], baseline: str) -> None:
    sizes = cache_race.MODEL_SHAPES["0.6b"] | SIZES
    model = cache_race.build_model(sizes, FakeGpu())
    tensors = [*model.parameters(), *model.buffers(), *cache_race.draw_random_rows(model, 40)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    calls: list[str] = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda _, args: calls.append(args[0].device.type)
    )
    task = cache_race.RaceTask(repeats=2, device=FakeGpu(), baseline=baseline)
    pair = cache_race.measure_pair(model, "affine8", 40, task)
    assert calls == ["meta"] * len(calls) and len(calls) == 2 * (task.warmup_tokens + 2)
    assert [contestant.laps.seconds for contestant in pair] == [[0.25, 0.25]] * 2
    assert [lap for lap in stream_log if lap == "settle"] == ["settle"] * 2 * (
        task.warmup_tokens + 2
    )
    figures = pair[1].summarize(pair[0], None)
    assert figures["median_ms"] == 250.0 and figures["host_ms"] > 0
