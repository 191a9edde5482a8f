"""Devices of a benchmark: everything that differs between a CPU and a GPU.

A device provides its clock, a plain pass over memory, torch's attention methods, the size of its
cache and a measurement of peak memory.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvant.bench.clock import Clock, CudaClock, TimedCall, WallClock, measure_resident_peak
from kvant.devices import parse_device

AttentionFunction = Callable[[Tensor, Tensor], Any]


def make_torch_attention(q: Tensor, heads: int, length: int) -> dict[str, AttentionFunction]:
    """Return torch's methods for queries [B, heads * group, T, D], the newest of `length` rows."""
    batch, all_heads, queries, dim = q.shape
    folded = q.view(batch, heads, -1, dim)
    mask = folded_mask = None
    if queries > 1:
        mask = torch.ones(queries, length, dtype=torch.bool, device=q.device)
        mask = mask.tril(length - queries)
        folded_mask = mask.repeat(all_heads // heads, 1)

    def by_hand(keys: Tensor, values: Tensor) -> Any:
        scores = folded @ keys.transpose(2, 3) * dim**-0.5
        if folded_mask is not None:
            scores = scores.masked_fill(~folded_mask, -torch.inf)
        return scores.softmax(-1) @ values

    return {
        "torch gqa": lambda k, v: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "torch folded": lambda k, v: sdpa(folded, k, v, attn_mask=folded_mask),
        "torch by hand": by_hand,
    }


def make_gpu_attention(
    q: Tensor, heads: int, length: int, compiler: Callable[..., Any] = torch.compile
) -> dict[str, AttentionFunction]:
    """Return torch's methods for GPUs; some may not run on this GPU."""
    methods = make_torch_attention(q, heads, length)
    gqa, flex = methods["torch gqa"], compiler(flex_attention, dynamic=False)
    queries, block_mask = q.shape[2], None
    if queries > 1:
        block_mask = create_block_mask(
            lambda b, h, row, column: column <= row + length - queries,
            *(None, None, queries, length),
            device=str(q.device),
        )

    def flash(keys: Tensor, values: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return gqa(keys, values)

    gpu_methods = {
        "torch flash": flash,
        "torch flex": lambda k, v: flex(q, k, v, block_mask=block_mask, enable_gqa=True),
    }
    return methods | gpu_methods


def filter_runnable(
    functions: Mapping[str, AttentionFunction], keys: Tensor, values: Tensor
) -> tuple[dict[str, AttentionFunction], list[str]]:
    """Run each method once; return those that run, and a line for each that does not."""
    runnable, skipped = {}, []
    for name, function in functions.items():
        try:
            function(keys, values)
            runnable[name] = function
        except Exception as error:  # compilers raise errors of any class
            reason = next(iter(str(error).strip().splitlines()), "no reason is given")
            skipped.append(f"{name}: {type(error).__name__}, {reason}")
    return runnable, skipped


DYNAMIC, STATIC = "dynamic", "static"  # caches of transformers


class BenchDevice(Protocol):
    """A device to measure on."""

    @property
    def name(self) -> str:
        """Name for torch and `--device`."""

    @property
    def clock(self) -> Clock: ...
    @property
    def cache_nbytes(self) -> int:
        """Bytes of cache that inputs must not be found in; 0 if one copy of inputs is enough."""

    @property
    def baseline(self) -> str:
        """The transformers cache that decodes fastest on this device."""

    def make_stream(self, nbytes: int) -> TimedCall:
        """Return a plain pass over memory that moves `nbytes` bytes."""

    def list_torch_attention(
        self, q: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[dict[str, AttentionFunction], list[str]]:
        """Return torch's methods, and a line for each that does not run."""

    def measure_peak(self, work: Callable[[], None]) -> int | None:
        """Return the bytes that `work` needs at its peak, beyond those in use."""

    def describe(self) -> dict[str, Any]:
        """Return what a report tells about the device, besides the processor."""


class CpuDevice:
    name = "cpu"
    clock: Clock = WallClock()
    cache_nbytes = 0
    baseline = DYNAMIC

    def make_stream(self, nbytes: int) -> TimedCall:
        return torch.ones(nbytes // 4).sum

    def list_torch_attention(
        self, q: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[dict[str, AttentionFunction], list[str]]:
        return make_torch_attention(q, *keys.shape[1:3]), []

    def measure_peak(self, work: Callable[[], None]) -> int | None:
        return measure_resident_peak(work)

    def describe(self) -> dict[str, Any]:
        return {}


class CudaDevice:
    """The current GPU of torch."""

    name = "cuda"
    clock: Clock = CudaClock()
    baseline = STATIC

    @property
    def cache_nbytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.name).L2_cache_size)

    def make_stream(self, nbytes: int) -> TimedCall:
        source, target = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=self.name)
        return partial(target.copy_, source)  # half of the bytes read, half written

    def list_torch_attention(
        self, q: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[dict[str, AttentionFunction], list[str]]:
        return filter_runnable(make_gpu_attention(q, *keys.shape[1:3]), keys, values)

    def measure_peak(self, work: Callable[[], None]) -> int | None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(self.name)
        return {
            "gpu": properties.name,
            "gpu_memory": properties.total_memory,
            "gpu_l2": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _read_driver_version(),
        }


CPU = CpuDevice()
DEVICES: dict[str, BenchDevice] = {"cpu": CPU, "cuda": CudaDevice()}


def choose_device(name: str | None) -> BenchDevice:
    """Return the device that `--device` names; the default is a GPU if there is one."""
    if name is not None and name.partition(":")[0] not in DEVICES:
        raise ValueError(f"--device {name}: known are {', '.join(DEVICES)}")
    torch_device = parse_device(name)
    if torch_device.index is not None:
        torch.cuda.set_device(torch_device)
    return DEVICES[torch_device.type]


def _read_driver_version() -> str | None:
    """Return the driver's version from nvidia-smi; torch does not tell it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(process.stdout.split()), None)
