"""What one decoded token costs at a context, with the host's own cache and with ours.

The model has the shape of Qwen3-0.6B and random weights, the rows are random and put into the
caches directly. The baseline, `dynamic`, is transformers' DynamicCache with SDPA. Each format is
measured beside a baseline of its own, one token each in turn, so two caches are held at most and
what else the machine does hits both. `ratio` is the baseline's median over the median of the
format: above 1, ours is faster. `best_ms` is what the machine can do when nothing disturbs it. One
token in 64 also seals a page: neither figure shows that, the mean of kvant.bench.append does.

`rest_mib` is what the cache has allocated for the context. `peak_mib` is what decoding needs beside
that: the highest resident memory of a process while it decodes as many tokens as are timed, over
what was resident just before. Each cache has a new process of its own for it, since an allocator
keeps what earlier work left and hides or adds tens of MiB. The mark is the kernel's own (VmHWM of
Linux, set back before the first token), so nothing falls between two samples; other systems have no
such mark, and there it stays empty.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from kvant.bench.report import progress
from kvant.hf import cache_for

SHAPE: dict[str, Any] = {  # of Qwen3-0.6B
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
BASELINE = "dynamic"
FORMATS = "raw,affine8,affine4"
CHUNK = 2048  # rows put into a cache of ours at once
FIRST = 2  # tokens that each cache decodes before it is timed


@dataclass
class Contestant:
    """A cache with its context, and what each token decoded with it took."""

    name: str
    cache: Any
    rest: int
    seconds: list[float] = field(default_factory=list)

    def decode(self, model: Any) -> None:
        token = torch.ones(1, 1, dtype=torch.int64)
        begin = time.perf_counter()
        model(token, past_key_values=self.cache)
        self.seconds.append(time.perf_counter() - begin)

    def figures(self, baseline: Contestant, peak: int | None) -> dict[str, Any]:
        median = statistics.median(self.seconds)
        return {
            "cache": self.name,
            "tokens": len(self.seconds),
            "median_ms": median * 1e3,
            "best_ms": min(self.seconds) * 1e3,
            "ratio": statistics.median(baseline.seconds) / median,
            "rest_mib": self.rest / 2**20,
            "peak_mib": None if peak is None else peak / 2**20,
        }


def build(layers: int, **sizes: int) -> Any:
    """The model, in bf16: allocated once, and filled without the host's slow initialization."""
    shape = SHAPE | {"num_hidden_layers": layers} | sizes
    config = Qwen3Config(**shape, attn_implementation="sdpa")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu").eval()
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are computed
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)  # a norm
            else:
                weight.normal_(0.0, 0.02, generator=generator)
        model(torch.ones(1, 1, dtype=torch.int64))  # memory that the first forward takes for good
    return model


def random_rows(model: Any, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values; all layers and all caches get the same."""
    config, generator = model.config, torch.Generator().manual_seed(context)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    keys, values = torch.randn(2, *shape, dtype=torch.bfloat16, generator=generator)
    return keys, values


def filled(model: Any, name: str, keys: Tensor, values: Tensor) -> Contestant:
    """A cache of that name that holds these rows in every layer."""
    if name == BASELINE:
        cache = DynamicCache(config=model.config)
        for layer in cache.layers:
            layer.update(keys, values)
        rest = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return Contestant(name, cache, rest)
    cache = cache_for(model, name)
    for begin in range(0, keys.shape[2], CHUNK):
        part = slice(begin, begin + CHUNK)
        for state in cache.states:
            state.append(keys[:, :, part], values[:, :, part])
    return Contestant(name, cache, cache.states.nbytes)


@torch.no_grad()
def measure(model: Any, name: str, context: int, repeats: int) -> tuple[Contestant, Contestant]:
    """Decode with the baseline and with a format of ours in turn."""
    rows = random_rows(model, context)
    theirs, ours = (filled(model, one, *rows) for one in (BASELINE, name))
    del rows
    for _ in range(FIRST + repeats):
        theirs.decode(model)
        ours.decode(model)
    del theirs.seconds[:FIRST], ours.seconds[:FIRST]
    return theirs, ours


@torch.no_grad()
def peak(layers: int, name: str, context: int, repeats: int, threads: int) -> int | None:
    """What decoding needs beside the cache, in bytes, where this process does nothing else."""
    torch.set_num_threads(threads)
    model = build(layers)
    contestant = filled(model, name, *random_rows(model, context))
    before = mark()
    for _ in range(repeats):
        contestant.decode(model)
    return None if before is None else max(0, resident("VmHWM") - before)


def alone(measured: Callable[..., int | None], *task: Any) -> int | None:
    """A peak, in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, *task).result()


def mark() -> int | None:
    """Set the peak back to what is resident now; None where a system has no such mark."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # or decoding would find memory that filling has not given back
        trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """Bytes, as Linux tells them under that name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def contest(
    lengths: Sequence[int], names: Sequence[str], repeats: int, layers: int, peaks: bool
) -> list[dict[str, Any]]:
    """A row for each length and each cache; the baseline has one beside every format."""
    if min(lengths) < 1:
        raise ValueError(f"contexts {', '.join(map(str, lengths))}: 1 row or more")
    progress("building the model")
    model = build(layers)
    for name in names:
        cache_for(model, name)  # what does not fit is refused now
    rows: list[dict[str, Any]] = []
    for length in lengths:
        needs: dict[str, int | None] = dict.fromkeys((BASELINE, *names))
        for name in needs if peaks else ():
            progress(f"{length} rows, {name}: the peak")
            needs[name] = alone(peak, layers, name, length, repeats, torch.get_num_threads())
        for name in names:
            progress(f"{length} rows, {name}: the time")
            pair = measure(model, name, length, repeats)
            rows += [{"rows": length, **one.figures(pair[0], needs[one.name])} for one in pair]
    progress("")
    return rows
