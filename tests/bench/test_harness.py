"""Test devices, their clocks and calls in turn.

GPU code runs on the CPU where it is equal, and in the stream of a simulated GPU elsewhere.
"""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from kvant.bench import harness
from kvant.bench.harness import (
    CPU,
    BenchDevice,
    CudaDevice,
    Lap,
    Laps,
    TimedCall,
    choose_device,
    time_in_turn,
)

THERE = SimpleNamespace(
    name="NVIDIA Something", total_memory=2**37, L2_cache_size=2**25, multi_processor_count=132
)


class CpuAsGpu(CudaDevice):
    """A GPU interface over CPU memory."""

    name = "cpu"


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the wall clock by a second per reading."""
    readings = count()
    monkeypatch.setattr(harness.time, "perf_counter", lambda: float(next(readings)))


def test_wall_clock_measures_a_call_until_it_returns() -> None:
    calls: list[int] = []
    laps = Laps([CPU.time_call(lambda: calls.append(1))])
    assert (calls, laps.seconds) == ([1], [1.0])
    assert laps.summarize() == {"median_ms": 1e3, "best_ms": 1e3}


class RecordingDevice(BenchDevice):
    """A CPU that records the calls of the harness before a turn and before a call."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def queue_turn(self) -> None:
        self.order.append("turn")

    def make_flush(self) -> TimedCall:
        return lambda: self.order.append("flush")

    def synchronize(self) -> None:
        self.order.append("wait")


@pytest.mark.parametrize(
    ("queued", "order"),
    [(True, ["turn", "flush", "a", "flush", "b"]), (False, ["wait", "a", "wait", "b"])],
)
def test_calls_take_turns_and_the_warmup_is_dropped(queued: bool, order: list[str]) -> None:
    device = RecordingDevice()
    calls = {name: lambda name=name: device.order.append(name) for name in "ab"}
    laps = time_in_turn(calls, 2, "", warmup=1, device=device, queued=queued)
    assert device.order == order * 3
    assert [len(call_laps) for call_laps in laps.values()] == [2, 2]


def test_events_surround_each_call_and_are_read_at_the_end(
    stream_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaDevice, "make_flush", lambda self: lambda: stream_log.append("flush"))
    calls = {name: lambda name=name: stream_log.append(name) for name in ("first", "second")}
    laps = time_in_turn(calls, 1, "", warmup=0, device=CudaDevice(), queued=True)
    first = ["flush", "event 0", "first", "event 1"]
    second = ["flush", "event 2", "second", "event 3"]
    assert stream_log == ["settle", "hold", *first, *second]  # no synchronization in between
    assert [call_laps.seconds for call_laps in laps.values()] == [[0.25], [0.25]]
    assert stream_log[-2:] == ["wait for event 1", "wait for event 3"]


def test_python_overhead_is_reported_separately(stream_log: list[str]) -> None:
    events = (torch.cuda.Event(enable_timing=True),) * 2
    laps = Laps(Lap(host, events) for host in (1.0, 2.0, 9.0))
    assert laps.summarize() == {"median_ms": 250.0, "best_ms": 250.0, "host_ms": 2e3}


def test_flush_reads_twice_the_cache_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: THERE)
    assert CpuAsGpu().make_flush().__self__.nbytes == 2 * THERE.L2_cache_size


def test_device_has_the_name_torch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") is CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("cuda").name == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device cuda: torch .* finds no GPU here; .* leave"):
        choose_device("cuda")
    with pytest.raises(ValueError, match="--device gpu: known are cpu, cuda"):
        choose_device("gpu")


def test_chosen_gpu_becomes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device("cuda:1").name == "cuda"
    assert current == [torch.device("cuda:1")]
    with pytest.raises(ValueError, match="--device cuda:2: here there is cpu, cuda:0, cuda:1"):
        choose_device("cuda:2")


def test_plain_pass_moves_the_requested_bytes() -> None:
    read = CPU.make_stream(4096)
    assert float(read()) == 4096 // 4  # sum of float32 ones
    copy = CpuAsGpu().make_stream(4096)
    (source,) = copy.args
    target = copy.func.__self__
    source.fill_(7)
    copy()
    assert source.nbytes + target.nbytes == 4096  # half is read, half is written
    assert bool((target == 7).all())


def test_machine_description_names_its_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: THERE)
    monkeypatch.setattr(harness, "_read_driver_version", lambda: "570.1")
    gpu = CudaDevice().describe()
    harness.print_report("attend", [{"rows": 1}], {"batch": 8}, quiet=True, gpu=gpu)
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["gpu"] == "NVIDIA Something" and machine["gpu_memory"] == 2**37
    assert (machine["gpu_l2"], machine["multiprocessors"]) == (2**25, 132)
    assert (machine["cuda"], machine["driver"]) == (torch.version.cuda, "570.1")
    assert "gpu" not in harness.describe_machine()


@pytest.mark.parametrize(("smi_output", "version"), [("570.1\n", "570.1"), ("", None)])
def test_driver_version_is_queried(
    smi_output: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.shutil, "which", lambda tool: tool)
    process = SimpleNamespace(stdout=smi_output)
    monkeypatch.setattr(harness.subprocess, "run", lambda words, **options: process)
    assert harness._read_driver_version() == version
    monkeypatch.setattr(harness.shutil, "which", lambda tool: None)
    assert harness._read_driver_version() is None


def test_gpu_peak_counts_only_added_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        now = most = 700

    def work() -> None:
        Memory.most = 950

    def reset() -> None:
        Memory.most = Memory.now

    Memory.most = 9999  # left by earlier work
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: Memory.now)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: Memory.most)
    assert CudaDevice().measure_peak(work) == 250
