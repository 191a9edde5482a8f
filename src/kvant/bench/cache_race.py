"""What one decoded token costs at a context, with the host's own cache and with ours.

The model has a known shape and random weights, the rows are random and put into the caches
directly. The baseline is one of transformers, with SDPA: `dynamic`, its DynamicCache, or `static`,
its StaticCache under a forward compiled as `generate` compiles it; the tokens that compile it are
not timed, nor as many of ours. Ours decode as `kvant.generate` does, on a GPU from a CUDA graph;
`replayed` tells how many tokens did. Each format is measured beside a baseline of its own, one
token each in turn, so two caches are held at most and what else the machine does hits both. With
`packed` a copy of the model, whose weights `kvant.pack` packed, takes turns with them. `ratio`
is the baseline's median over the median of the format: above 1, ours is faster. `best_ms` is what
the machine can do when nothing disturbs it. One token in 64 also seals a page: neither figure shows
that, the mean of kvant.bench.append does.

`rest_mib` is what the cache has allocated for the context. `peak_mib` is what decoding needs beside
that: the highest resident memory of a process while it decodes as many tokens as are timed, over
what was resident just before (clock.py). Each cache has a new process of its own for it, since an
allocator keeps what earlier work left and hides or adds tens of MiB. On a GPU it is the highest
memory that torch has allocated there.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from kvant.bench.clock import Lap, run_in_process
from kvant.bench.device import CPU, DEVICES, DYNAMIC, STATIC, BenchDevice
from kvant.bench.report import show_progress
from kvant.generation import TransformersDecoder
from kvant.hf import cache_for, get_cache_argument
from kvant.weights import pack

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {  # Qwen3-0.6B
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "8b": {  # the numbers of Llama 3.1 8B, in a model of Qwen3's kind
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
}
DEFAULT_FORMATS = "raw,affine8,affine4"
APPEND_CHUNK = 2048  # rows put into a cache of ours at once
PACKED_SUFFIX = " packed"  # said of a format whose model has packed weights
WARMUP_TOKENS = {  # tokens that each cache decodes before it is timed
    DYNAMIC: 2,
    STATIC: 4,  # the first compiles, the second is captured as a CUDA graph
}


@dataclass(frozen=True)
class RaceTask:
    """What is decoded with every cache, and where; another process can be given it."""

    layers: int | None = None  # those of the shape
    repeats: int = 9
    shape: str = "0.6b"
    device: BenchDevice = CPU
    baseline: str = CPU.baseline
    compiled: bool = False  # ours, too
    packed: bool = False  # ours once more, with packed weights

    def __post_init__(self) -> None:
        for option, given, known in (
            ("shape", self.shape, MODEL_SHAPES),
            ("baseline", self.baseline, WARMUP_TOKENS),
        ):
            if given not in known:
                raise ValueError(f"--{option} {given}: known are {', '.join(known)}")
        if self.compiled and self.device.name == CPU.name:
            raise ValueError("--compile: what is compiled is the CUDA graph of a GPU")
        if self.packed and self.device.name != CPU.name:
            raise ValueError(f"--pack: weights are packed for a CPU, not for {self.device.name}")

    @property
    def warmup_tokens(self) -> int:
        return WARMUP_TOKENS[self.baseline]

    @property
    def model_sizes(self) -> dict[str, Any]:
        own = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return MODEL_SHAPES[self.shape] | own


@dataclass
class Contestant:
    """A cache with its context, and what each token decoded with it took."""

    name: str
    cache: Any
    cache_nbytes: int
    forward: Callable[..., Any]
    device: BenchDevice = CPU
    laps: list[Lap] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [lap.seconds for lap in self.laps]

    @property
    def num_replayed(self) -> int | None:
        """How many tokens came from a graph of ours, or a recording."""
        return None if self.name in WARMUP_TOKENS else self.cache.stats()["replayed"]

    def decode(self) -> None:
        """One token more, once all before it are there: a loop needs each to ask for the next."""
        token = torch.ones(1, 1, dtype=torch.int64, device=self.device.name)
        clock = self.device.clock
        clock.synchronize()
        self.laps.append(clock.time_call(lambda: self.forward(token, self.cache)))

    def summarize(self, baseline: Contestant, peak: int | None) -> dict[str, Any]:
        seconds = self.seconds
        median = statistics.median(seconds)
        return {
            "cache": self.name,
            "tokens": len(seconds),
            "median_ms": median * 1e3,
            "best_ms": min(seconds) * 1e3,
            "ratio": statistics.median(baseline.seconds) / median,
            "rest_mib": self.cache_nbytes / 2**20,
            "peak_mib": None if peak is None else peak / 2**20,
            "replayed": self.num_replayed,
            **self.device.clock.describe_laps(self.laps),
        }


def open_model(
    shape: str, layers: int | None, threads: int | None
) -> tuple[Any, Mapping[str, Any]]:
    """The model of a benchmark on a CPU, and its sizes, with so many threads of torch."""
    if threads is not None:
        torch.set_num_threads(threads)
    sizes = RaceTask(layers, shape=shape).model_sizes
    show_progress("building the model")
    return build_model(sizes), sizes


def build_model(sizes: Mapping[str, Any], device: BenchDevice = CPU, compiled: bool = False) -> Any:
    """The model, in bf16: allocated once, and filled without the host's slow initialization."""
    config = Qwen3Config(**sizes, attn_implementation="sdpa")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device.name).eval()
    model.tie_weights()
    model.generation_config.compile_config = CompileConfig() if compiled else None
    turning = type(model.model.rotary_emb)(config)  # its buffers are computed
    model.model.rotary_emb = turning.to(device.name)
    generator = torch.Generator(device.name).manual_seed(0)
    token = torch.ones(1, 1, dtype=torch.int64, device=device.name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)  # a norm
            else:
                weight.normal_(0.0, 0.02, generator=generator)
        model(token)  # memory that the first forward takes for good
    return model


def _copy_packed(model: Any) -> Any:
    """A copy of the model with packed weights."""
    twin = copy.deepcopy(model)
    pack(twin)
    return twin


def random_rows(model: Any, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values; all layers and all caches get the same."""
    config, generator = model.config, torch.Generator().manual_seed(context)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    keys, values = torch.randn(2, *shape, dtype=torch.bfloat16, generator=generator)
    return keys.to(model.device), values.to(model.device)


def make_contestant(
    model: Any, name: str, keys: Tensor, values: Tensor, tokens: int = 0
) -> Contestant:
    """A cache of that name that holds these rows in every layer; so many tokens will follow."""
    device = DEVICES[model.device.type]
    if name in WARMUP_TOKENS:
        cache, call = make_transformers_cache(model, name, keys.shape[2] + tokens)
        given = get_cache_argument(model)

        def call_with_cache(token: Tensor, cache: Any) -> Any:
            return call(token, **{given: cache})

        for layer in cache.layers:
            layer.update(keys, values)
        rest = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return Contestant(name, cache, rest, call_with_cache, device)
    cache = cache_for(model, name)
    for begin in range(0, keys.shape[2], APPEND_CHUNK):
        part = slice(begin, begin + APPEND_CHUNK)
        for state in cache.states:
            state.append(keys[:, :, part], values[:, :, part])
    decoder = TransformersDecoder(model)

    def forward(token: Tensor, cache: Any) -> Tensor:
        return decoder.compute_logits([1], cache)  # the token, which this machine knows

    return Contestant(name, cache, cache.states.nbytes, forward, device)


def make_transformers_cache(model: Any, name: str, length: int) -> tuple[Any, Callable[..., Any]]:
    """A cache of the host's for so many rows, and the forward that goes with it."""
    if name == DYNAMIC:
        return DynamicCache(config=model.config), model
    torch.compiler.reset()  # or a second length would be compiled as one that changes
    # Masks of a length that is a multiple of 64 are read without being copied.
    cache = StaticCache(config=model.config, max_cache_len=-(-length // 64) * 64)
    return cache, model.get_compiled_call(None)


@torch.no_grad()
def measure_pair(
    model: Any, name: str, context: int, task: RaceTask, packed: Any = None
) -> list[Contestant]:
    """Decode with the baseline and with a format of ours in turn, also with a packed model."""
    rows = random_rows(model, context)
    tokens = task.warmup_tokens + task.repeats
    several = [make_contestant(model, one, *rows, tokens) for one in (task.baseline, name)]
    if packed is not None:
        several.append(make_contestant(packed, name, *rows, tokens))
        several[-1].name += PACKED_SUFFIX
    del rows
    for _ in range(tokens):
        for one in several:
            one.decode()
    for one in several:
        del one.laps[: task.warmup_tokens]
    return several


@torch.no_grad()
def measure_peak(task: RaceTask, name: str, context: int, threads: int) -> int | None:
    """What decoding needs beside the cache, in bytes, where this process does nothing else."""
    torch.set_num_threads(threads)
    model = build_model(task.model_sizes, task.device, task.compiled)
    contestant = make_contestant(
        model, name, *random_rows(model, context), task.warmup_tokens + task.repeats
    )
    if name == STATIC:
        for _ in range(task.warmup_tokens):  # what it takes to compile is not what decoding takes
            contestant.decode()

    def decode() -> None:
        for _ in range(task.repeats):
            contestant.decode()

    return task.device.measure_peak(decode)


def run_race(
    lengths: Sequence[int], names: Sequence[str], task: RaceTask, *, peaks: bool
) -> list[dict[str, Any]]:
    """A row for each length and each cache; the baseline has one beside every format."""
    if min(lengths) < 1:
        raise ValueError(f"contexts {', '.join(map(str, lengths))}: 1 row or more")
    show_progress("building the model")
    model = build_model(task.model_sizes, task.device, task.compiled)
    packed = _copy_packed(model) if task.packed else None
    for name in names:
        cache_for(model, name)  # what does not fit is refused now
    rows: list[dict[str, Any]] = []
    for length in lengths:
        needs: dict[str, int | None] = dict.fromkeys((task.baseline, *names))
        for name in needs if peaks else ():
            show_progress(f"{length} rows, {name}: the peak")
            needs[name] = run_in_process(measure_peak, task, name, length, torch.get_num_threads())
        for name in names:
            show_progress(f"{length} rows, {name}: the time")
            several = measure_pair(model, name, length, task, packed)
            rows += [
                {"rows": length, **one.summarize(several[0], needs.get(one.name))}
                for one in several
            ]
    show_progress("")
    return rows
