"""Test devices; GPU code runs on the CPU where it is equal, and is simulated elsewhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from kvant.bench import device, report
from kvant.bench.device import CPU, CudaDevice, choose_device

THERE = SimpleNamespace(
    name="NVIDIA Something", total_memory=2**37, L2_cache_size=2**25, multi_processor_count=132
)


class CpuAsGpu(CudaDevice):
    """A GPU interface over CPU memory."""

    name = "cpu"


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


def test_gpu_has_more_torch_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    q, (keys, values) = torch.randn(1, 4, 1, 16), torch.randn(2, 1, 2, 8, 16)
    monkeypatch.setattr(
        device, "make_gpu_attention", lambda *a: {"torch flash": min, "torch flex": fail_flex}
    )
    everywhere = ["torch gqa", "torch folded", "torch by hand"]
    backends, skipped = CPU.list_torch_attention(q, keys, values)
    assert (list(backends), skipped) == (everywhere, [])
    backends, skipped = CpuAsGpu().list_torch_attention(q, keys, values)
    assert list(backends) == []
    assert [line.split(":")[0] for line in skipped] == ["torch flash", "torch flex"]


def fail_flex(keys: torch.Tensor, values: torch.Tensor) -> None:
    raise RuntimeError("no such kernel")


def test_machine_description_names_its_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda name: THERE)
    monkeypatch.setattr(device, "_read_driver_version", lambda: "570.1")
    report.print_report("attend", [{"rows": 1}], {"batch": 8}, quiet=True, device=CudaDevice())
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["gpu"] == "NVIDIA Something" and machine["gpu_memory"] == 2**37
    assert (machine["gpu_l2"], machine["multiprocessors"]) == (2**25, 132)
    assert (machine["cuda"], machine["driver"]) == (torch.version.cuda, "570.1")
    assert CudaDevice().cache_nbytes == 2**25
    assert "gpu" not in report.describe_machine()


@pytest.mark.parametrize(("smi_output", "version"), [("570.1\n", "570.1"), ("", None)])
def test_driver_version_is_queried(
    smi_output: str, version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.shutil, "which", lambda tool: tool)
    process = SimpleNamespace(stdout=smi_output)
    monkeypatch.setattr(device.subprocess, "run", lambda words, **options: process)
    assert device._read_driver_version() == version
    monkeypatch.setattr(device.shutil, "which", lambda tool: None)
    assert device._read_driver_version() is None


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
