"""Write the golden files: `PYTHONPATH=tests python -m golden.artifacts`, after a change of format.

Everything in them follows from integers: rows, weights and buffers are multiples of a power of two,
so that files and the keys of pages are the same on every processor.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
import transformers
from torch import Tensor

import kvant
from generation.speakers import Numbers
from kvant import Cache, CacheSpec, Engine, GroupSpec, Prefixes, RecurrentSpec, Session

FOLDER = Path(__file__).with_name("files")
ROWS, HEADS, DIM = 220, 1, 16
PROMPT = [3 + number * 37 % 120 for number in range(270)]  # four whole pages and 14 tokens
STORES = {  # name -> family, spec
    "raw": ("llama", "raw"),
    "affine4": ("llama", "affine4,prefill=stored"),
    "turbo4v4": ("llama", "turbo4v4,prefill=stored"),
    "window": ("llama", "raw,window=80,sinks=4"),
    "hybrid": ("lfm2", "affine8,prefill=stored"),
}
COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}


def make_exact_values(shape: tuple[int, ...], name: str) -> Tensor:
    """Return values in [-0.5, 0.5) that float32 and bfloat16 hold exactly."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count) * 2654435761 + crc32(name.encode())) % 2**32
    return ((mixed >> 25).float() / 128 - 0.5).reshape(shape)


def model_of(family: str) -> Any:
    """A tiny model with exact weights."""
    if family == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    else:
        types = ["conv", "full_attention"]
        model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**COMMON, layer_types=types))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(make_exact_values(tuple(weight.shape), name) + (weight.dim() == 1))
        for _, buffer in model.named_buffers():  # rotary frequencies
            buffer.copy_(0.5 ** torch.arange(buffer.numel()).reshape(buffer.shape))
    model.generation_config.eos_token_id = None
    return model.eval()


def append(layer: Any, begin: int, end: int, name: str) -> Any:
    """Append rows `begin` to `end` of the sequence with this name."""
    keys, values = make_exact_values((2, 1, HEADS, 512, DIM), name)[:, :, :, begin:end]
    return layer.append(keys, values)


def make_filled_cache(spec: str) -> Cache:
    cache = Cache(2, spec)
    for layer in cache:
        append(layer, 0, ROWS, "rows")
    return cache


def make_pruned_cache() -> Cache:
    cache = make_filled_cache("affine8,prune=keydiff:50%")
    cache.prune()
    return cache


def make_hybrid() -> Cache:
    (layer,) = kvant.parse("affine8", 1).layers
    group = GroupSpec((("rows", layer), ("memory", RecurrentSpec(4))))
    cache = Cache(None, CacheSpec((layer, group)))
    append(cache[0], 0, ROWS, "rows")
    append(cache[1]["rows"], 0, ROWS, "rows")
    cache[1]["memory"].append(ROWS, {"conv": make_exact_values((1, 4, 2), "conv")})
    return cache


CACHES: dict[str, Callable[[], Cache]] = {
    "raw": lambda: make_filled_cache("raw"),
    "affine4": lambda: make_filled_cache("affine4"),
    "turbo4v2": lambda: make_filled_cache("turbo4v2"),
    "window": lambda: make_filled_cache("affine8,window=70,sinks=4"),
    "hybrid": make_hybrid,
    "pruned": make_pruned_cache,
}


def make_session() -> Session:
    """Return a session after one turn."""
    session = Session(model_of("llama"), Numbers(), "affine8")
    for _ in session.send("3 4 5 6 7", max_new_tokens=8):
        pass
    return session


def generate_reply(family: str, spec: str, store: Path | None) -> Any:
    """Return the reply to the prompt by an engine with prefixes from this store."""
    prefixes = None if store is None else Prefixes(store=str(store))
    with Engine(model_of(family), Numbers(), spec, prefixes=prefixes, pack=False) as engine:
        result = engine.submit(PROMPT, max_new_tokens=6, ignore_end=True).result()
    if prefixes is not None:
        prefixes.flush()
        prefixes.close()
    return result


def write_all() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    for name, make in CACHES.items():
        kvant.save(make(), FOLDER / f"{name}.kv")
    make_session().save(FOLDER / "session.kv")
    for name, (family, spec) in STORES.items():
        generate_reply(family, spec, FOLDER / "stores" / name)


if __name__ == "__main__":
    write_all()
