"""Time one decoded token at a context, with transformers' caches and with kvant's.

The model has a known shape and random weights; random rows are put into the caches directly. The
baseline is `dynamic`, transformers' DynamicCache, or `static`, its StaticCache with a compiled
forward, both with SDPA. Tokens that compile or capture are not timed. kvant decodes as
`kvant.generate` does, on a GPU from a CUDA graph; `replayed` counts replayed tokens. Each format is
measured together with its own baseline, one token each in turn: only two caches exist at a time,
and other load on the machine affects both. With `packed`, a copy of the model with packed weights
takes turns too.

`ratio` is the baseline's median over the format's median: above 1, kvant is faster. `best_ms` is
the time without disturbance. One token in 64 also seals a page, which neither figure shows, but
the mean of kvant.bench.append does.

`rest_mib` is the size of the cache at the context. `peak_mib` is what decoding needs in addition:
the peak of resident memory while as many tokens are decoded as are timed, minus resident memory
before (harness.py). Each cache is measured in a new process, since an allocator keeps freed memory,
tens of MiB. On a GPU it is the peak of torch's allocated memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import CompileConfig, DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from kvant.bench import harness
from kvant.bench.harness import (
    CPU,
    DYNAMIC,
    STATIC,
    BenchDevice,
    Laps,
    run_in_process,
    time_in_turn,
)
from kvant.generation import TransformersDecoder
from kvant.hf import cache_for, get_cache_argument
from kvant.spec import split_specs
from kvant.weights.packing import pack

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
    "8b": {  # the sizes of Llama 3.1 8B, in Qwen3's architecture
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
    "tiny": {  # for a rehearsal
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "vocab_size": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
}
Shape = Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(MODEL_SHAPES)}")]
APPEND_CHUNK = 2048  # rows appended at once
PACKED_SUFFIX = " packed"  # in the name of a format with packed weights
WARMUP_TOKENS = {  # tokens per cache before the timed tokens
    DYNAMIC: 2,
    STATIC: 4,  # the first compiles, the second is captured as a CUDA graph
}


@dataclass(frozen=True)
class RaceTask:
    """What to decode, and where; it can be sent to another process."""

    layers: int | None = None  # default: those of the shape
    repeats: int = 9
    shape: str = "0.6b"
    formats: str = "raw,affine8,affine4"
    device: BenchDevice = CPU
    baseline: str = CPU.baseline
    compiled: bool = False  # kvant's forward, too
    weights: str | None = None  # also with weights packed so
    peaks: bool = True  # also the memory
    apart: bool = False  # kernels run on kvant's own threads

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("shape", self.shape, MODEL_SHAPES),
            ("baseline", self.baseline, WARMUP_TOKENS),
        ):
            if value not in choices:
                raise ValueError(f"--{option} {value}: known are {', '.join(choices)}")
        if self.compiled and self.device.name == CPU.name:
            raise ValueError("--compile: only the CUDA graph of a GPU can be compiled")
        if self.weights is not None and self.device.name != CPU.name:
            raise ValueError(f"--weights: they are packed for a CPU, not for {self.device.name}")

    @property
    def warmup_tokens(self) -> int:
        return WARMUP_TOKENS[self.baseline]

    @property
    def model_sizes(self) -> dict[str, Any]:
        overrides = {} if self.layers is None else {"num_hidden_layers": self.layers}
        return MODEL_SHAPES[self.shape] | overrides

    @property
    def model_facts(self) -> dict[str, Any]:
        return {
            "model": f"{self.shape}, random",
            "layers": self.model_sizes["num_hidden_layers"],
            "transformers": version("transformers"),
        }


@dataclass
class Contestant:
    """A cache filled to the context, and the time of each token decoded with it."""

    name: str
    cache: Any
    cache_nbytes: int
    decode: Callable[[], Any]  # one token
    laps: Laps = field(default_factory=Laps)

    @property
    def num_replayed(self) -> int | None:
        """Number of tokens replayed from a graph or natively; None for transformers' caches."""
        return None if self.name in WARMUP_TOKENS else self.cache.stats()["replayed"]

    def summarize(self, baseline: Contestant, peak: int | None) -> dict[str, Any]:
        return {
            "cache": self.name,
            "tokens": len(self.laps),
            **self.laps.summarize(),
            "ratio": baseline.laps.median / self.laps.median,
            "rest_mib": self.cache_nbytes / 2**20,
            "peak_mib": None if peak is None else peak / 2**20,
            "replayed": self.num_replayed,
        }


@torch.no_grad()
def decode_in_turn(
    contestants: Sequence[Contestant],
    tokens: int,
    label: str,
    *,
    warmup: int,
    device: BenchDevice = CPU,
) -> None:
    """Decode `tokens` tokens with each contestant in turn, after those of the warm-up."""
    calls = {number: contestant.decode for number, contestant in enumerate(contestants)}
    for number, laps in time_in_turn(calls, tokens, label, warmup=warmup, device=device).items():
        contestants[number].laps = laps


def open_model(
    shape: str, layers: int | None, threads: int | None, device: BenchDevice = CPU
) -> tuple[Any, dict[str, Any]]:
    """Build a benchmark's model and set torch's threads; return it and its facts."""
    harness.set_threads(threads)
    task = RaceTask(layers, shape=shape)
    harness.show_progress("building the model")
    return build_model(task.model_sizes, device), task.model_facts


def build_model(sizes: Mapping[str, Any], device: BenchDevice = CPU, compiled: bool = False) -> Any:
    """Build the model in bf16; skip transformers' slow initialization of weights."""
    config = Qwen3Config(**sizes, attn_implementation="sdpa")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device.name).eval()
    model.tie_weights()
    model.generation_config.compile_config = CompileConfig() if compiled else None
    rotary = type(model.model.rotary_emb)(config)  # its buffers are computed, not allocated
    model.model.rotary_emb = rotary.to(device.name)
    generator = torch.Generator(device.name).manual_seed(0)
    token = torch.ones(1, 1, dtype=torch.int64, device=device.name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)  # a norm
            else:
                weight.normal_(0.0, 0.02, generator=generator)
        model(token)  # the first forward allocates memory permanently
    return model


def draw_random_rows(model: Any, context: int) -> tuple[Tensor, Tensor]:
    """Return random keys and values, the same for all layers and caches."""
    config, generator = model.config, torch.Generator().manual_seed(context)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    keys, values = torch.randn(2, *shape, dtype=torch.bfloat16, generator=generator)
    return keys.to(model.device), values.to(model.device)


def make_contestant(
    model: Any, name: str, keys: Tensor, values: Tensor, tokens: int = 0
) -> Contestant:
    """Make a cache by name, filled with the rows; a StaticCache has room for `tokens` more."""
    if name in WARMUP_TOKENS:
        cache, forward = make_transformers_cache(model, name, keys.shape[2] + tokens)
        for layer in cache.layers:
            layer.update(keys, values)
        cache_nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        token = torch.ones(len(keys), 1, dtype=torch.int64, device=model.device)
        options = {get_cache_argument(model): cache}
        return Contestant(name, cache, cache_nbytes, lambda: forward(token, **options))
    cache = cache_for(model, name)
    for begin in range(0, keys.shape[2], APPEND_CHUNK):
        part = slice(begin, begin + APPEND_CHUNK)
        for state in cache.states:
            state.append(keys[:, :, part], values[:, :, part])
    decoder = TransformersDecoder(model)
    return Contestant(name, cache, cache.states.nbytes, lambda: decoder.compute_logits([1], cache))


def make_transformers_cache(model: Any, name: str, length: int) -> tuple[Any, Callable[..., Any]]:
    """Make a transformers cache for `length` rows, and the forward to use with it."""
    if name == DYNAMIC:
        return DynamicCache(config=model.config), model
    torch.compiler.reset()  # a second length would otherwise be compiled as a dynamic size
    # With a multiple of 64, SDPA reads the mask without a copy.
    cache = StaticCache(config=model.config, max_cache_len=-(-length // 64) * 64)
    return cache, model.get_compiled_call(None)


def measure_pair(
    model: Any, name: str, context: int, task: RaceTask, packed: Any = None
) -> list[Contestant]:
    """Decode with the baseline and a format in turn, optionally also with a packed model."""
    rows = draw_random_rows(model, context)
    tokens = task.warmup_tokens + task.repeats
    contestants = [make_contestant(model, n, *rows, tokens) for n in (task.baseline, name)]
    if packed is not None:
        contestants.append(make_contestant(packed, name, *rows, tokens))
        contestants[-1].name += PACKED_SUFFIX
    del rows
    label = f"{context} rows, {name}"
    decode_in_turn(contestants, task.repeats, label, warmup=task.warmup_tokens, device=task.device)
    return contestants


@torch.no_grad()
def measure_peak(task: RaceTask, name: str, context: int, threads: int) -> int | None:
    """Return the bytes that decoding needs beyond the cache; run it in a new process."""
    torch.set_num_threads(threads)
    model = build_model(task.model_sizes, task.device, task.compiled)
    contestant = make_contestant(
        model, name, *draw_random_rows(model, context), task.warmup_tokens + task.repeats
    )
    if name == STATIC:
        for _ in range(task.warmup_tokens):  # memory for compiling is not counted
            contestant.decode()

    def decode() -> None:
        for _ in range(task.repeats):
            contestant.decode()

    return task.device.measure_peak(decode)


def run_race(lengths: Sequence[int], task: RaceTask) -> list[dict[str, Any]]:
    """Return a row for each length and cache, and one of the baseline for each format."""
    names = split_specs(task.formats)
    harness.show_progress("building the model")
    model = build_model(task.model_sizes, task.device, task.compiled)
    packed = None
    if task.weights is not None:
        packed = copy.deepcopy(model)
        pack(packed, task.weights)
    for name in names:
        cache_for(model, name)  # raises for a spec that does not fit the model
    rows: list[dict[str, Any]] = []
    for length in lengths:
        peaks_by_name: dict[str, int | None] = dict.fromkeys((task.baseline, *names))
        for name in peaks_by_name if task.peaks else ():
            harness.show_progress(f"{length} rows, {name}: the peak")
            threads = torch.get_num_threads()
            peaks_by_name[name] = run_in_process(measure_peak, task, name, length, threads)
        for name in names:
            contestants = measure_pair(model, name, length, task, packed)
            rows += [
                {"rows": length, **c.summarize(contestants[0], peaks_by_name.get(c.name))}
                for c in contestants
            ]
    return rows
