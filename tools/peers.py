"""Quantized caches of transformers, measured as kvant's formats: divergence, bytes, token times.

During prefill they attend to the uncompressed prompt, so tokens are fed one by one to measure what
decoding sees. Two texts of 1,024 tokens are enough; kvant's formats are measured on them, too. The
caches requantize rows and choose the dtype of scales by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import QuantizedCache

from kvant.bench.candidates import MakeCandidate, make_cached, make_candidates, make_dynamic
from kvant.bench.decode import measure_latencies
from kvant.checkpoints import load
from kvant.eval.evaluation import split_text
from kvant.eval.result import summarize_quality
from kvant.probing import measure_divergence
from kvant.probing.divergence import measure_cache_divergence

NUM_PIECES, CONTEXT, SEED = 2, 1024, 0
TIMED_LENGTH, REPEATS = 1536, 31  # tokens in the cache, and timed tokens
BASELINE = "transformers"  # its DynamicCache, without quantization
PEER_CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "quanto, 4 bits": ("quanto", {"nbits": 4}),
    "quanto, 2 bits": ("quanto", {"nbits": 2}),
    "hqq, 8 bits": ("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1}),
    "hqq, 4 bits": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "fp8 of transformers": ("fp8", {}),
}
KVANT_FORMATS = (
    *("affine8", "fp8", "affine4,group=64,tail=0", "turbo4v4,tail=0"),
    *("affine4,group=64", "affine4", "affine4,smooth", "turbo4v4"),
    *("affine2,group=64,tail=0", "turbo2,tail=0", "turbo2"),
)
FORMATS = (*PEER_CACHES, *KVANT_FORMATS)


class QuantizerUnavailable(Exception):
    """Reason why a peer is skipped."""


def make_cache_factory(model: Any, name: str) -> Callable[[], Any]:
    backend, options = PEER_CACHES[name]
    if backend in ("quanto", "hqq") and not find_spec("optimum" if backend == "quanto" else "hqq"):
        raise QuantizerUnavailable(f"{name}: pip install kvant[peers]")
    return lambda: QuantizedCache(backend, model.config, **options)


def measure_quality(model: Any, pieces: tuple[Tensor, ...], name: str) -> dict[str, Any]:
    short_pieces = [piece[:, :CONTEXT] for piece in pieces[:NUM_PIECES]]
    if name in PEER_CACHES:
        make_cache = make_cache_factory(model, name)
        divergence = measure_cache_divergence(model, short_pieces, make_cache, chunk=1)
    else:
        divergence = measure_divergence(model, short_pieces, name)
    return summarize_quality(divergence, SEED)


def measure_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Return milliseconds per token and bytes of each cache, measured in turn, in bf16."""
    model, _ = load(None, device="cpu")
    candidates: dict[str, Any] = {BASELINE: make_dynamic(model)()}
    for name in PEER_CACHES:
        try:
            cache = make_cache_factory(model, name)()
        except QuantizerUnavailable as error:
            print(f"skipped: {error}")
            continue
        candidates[name] = make_cached(model, cache, _measure_cache)
    candidates |= {
        name: make() for name, make in make_candidates(model, ("raw", *KVANT_FORMATS)).items()
    }
    makes: dict[str, MakeCandidate] = {name: lambda c=c: c for name, c in candidates.items()}
    text = split_text(tokenizer, None, TIMED_LENGTH, TIMED_LENGTH).pieces[0][0].tolist()
    rows = measure_latencies(makes, text, [TIMED_LENGTH], REPEATS)
    return [row | {"nbytes": candidates[row["cache"]].measure_nbytes()} for row in rows]


def _measure_cache(cache: Any) -> int:
    return sum(_measure_nbytes(vars(layer)) for layer in cache.layers)


def _measure_nbytes(value: Any) -> int:
    """Return the bytes of all tensors in a value, nested ones included."""
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            return value.nbytes
        value = [getattr(value, name) for name in flatten()[0]]
    if isinstance(value, dict):
        value = [*value.values()]
    return sum(map(_measure_nbytes, value)) if isinstance(value, list | tuple) else 0
