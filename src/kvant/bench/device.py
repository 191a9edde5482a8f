"""Where a benchmark runs: all that a GPU needs otherwise than a CPU, so that nobody else asks.

A device tells its clock, what a plain pass over memory is there, what torch has to attend with, how
much its cache holds of inputs that come again, and the highest memory while something works.
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
    """For queries [B, heads * group, T, D], the newest of `length` rows."""
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
    """Those, and what torch has for GPUs alone; which of them run is not said."""
    ways = make_torch_attention(q, heads, length)
    gqa, flex = ways["torch gqa"], compiler(flex_attention, dynamic=False)
    queries, blocks = q.shape[2], None
    if queries > 1:
        blocks = create_block_mask(
            lambda b, h, row, column: column <= row + length - queries,
            *(None, None, queries, length),
            device=str(q.device),
        )

    def flash(keys: Tensor, values: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return gqa(keys, values)

    own = {
        "torch flash": flash,
        "torch flex": lambda k, v: flex(q, k, v, block_mask=blocks, enable_gqa=True),
    }
    return ways | own


def filter_runnable(
    functions: Mapping[str, AttentionFunction], keys: Tensor, values: Tensor
) -> tuple[dict[str, AttentionFunction], list[str]]:
    """Those that run, found by running them once, and a line for each that does not."""
    found, skipped = {}, []
    for name, way in functions.items():
        try:
            way(keys, values)
            found[name] = way
        except Exception as error:  # what compilers raise has no common kind
            reason = next(iter(str(error).strip().splitlines()), "no reason is given")
            skipped.append(f"{name}: {type(error).__name__}, {reason}")
    return found, skipped


DYNAMIC, STATIC = "dynamic", "static"  # caches of the host's


class BenchDevice(Protocol):
    @property
    def name(self) -> str:
        """As torch and `--device` call it."""

    @property
    def clock(self) -> Clock: ...
    @property
    def cache_nbytes(self) -> int:
        """Bytes of inputs that it could find again in a cache; 0 where none are kept from it."""

    @property
    def baseline(self) -> str:
        """The host's cache, as it decodes fastest here."""

    def make_stream(self, nbytes: int) -> TimedCall:
        """A plain pass over memory that moves so many bytes."""

    def list_torch_attention(
        self, q: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[dict[str, AttentionFunction], list[str]]:
        """What torch has, and a line for each way that does not run."""

    def measure_peak(self, work: Callable[[], None]) -> int | None:
        """Bytes that `work` needs for a moment beside what is there."""

    def describe(self) -> dict[str, Any]:
        """What there is to say of it beside the processor."""


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
    """The GPU that is current to torch."""

    name = "cuda"
    clock: Clock = CudaClock()
    baseline = STATIC

    @property
    def cache_nbytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.name).L2_cache_size)

    def make_stream(self, nbytes: int) -> TimedCall:
        source, target = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=self.name)
        return partial(target.copy_, source)  # half is read and half is written

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
        there = torch.cuda.get_device_properties(self.name)
        return {
            "gpu": there.name,
            "gpu_memory": there.total_memory,
            "gpu_l2": there.L2_cache_size,
            "multiprocessors": there.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _read_driver_version(),
        }


CPU = CpuDevice()
DEVICES: dict[str, BenchDevice] = {"cpu": CPU, "cuda": CudaDevice()}


def choose_device(name: str | None) -> BenchDevice:
    """What `--device` names, if it is there; unnamed, a GPU where there is one."""
    if name is not None and name.partition(":")[0] not in DEVICES:
        raise ValueError(f"--device {name}: known are {', '.join(DEVICES)}")
    place = parse_device(name)
    if place.index is not None:
        torch.cuda.set_device(place)
    return DEVICES[place.type]


def _read_driver_version() -> str | None:
    """Its version, as its own tool tells it: torch does not know."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return next(iter(done.stdout.split()), None)
