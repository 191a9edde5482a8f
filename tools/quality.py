"""Measure what formats do to the built-in model, for docs/quality.json and docs/quality.md.

`python tools/quality.py` takes half an hour; rows in the file are not measured again. The model
runs in float32, on texts that it was not trained on, with the code of `kvant eval`; bytes are those
of bf16. Models with outliers compute the same function, with a few channels of their keys or values
scaled by 30 or 100.

The peers of `pip install kvant[peers]` are measured if they are installed: quantized caches of
transformers. During prefill they attend to the uncompressed prompt, so tokens are fed one by one to
measure what decoding sees. Two texts of 1,024 tokens are enough; kvant's formats are measured on
them, too. The caches requantize rows and choose the dtype of scales by themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from transformers import QuantizedCache

import kvant
from kvant.bench.decode import (
    MakeCandidate,
    make_cached,
    make_candidates,
    make_dynamic,
    measure_latencies,
)
from kvant.bench.harness import describe_machine, show_progress
from kvant.checkpoints import load
from kvant.codecs import Affine
from kvant.codecs.packing import saturate
from kvant.contracts import Codec
from kvant.eval.evaluation import split_text
from kvant.eval.result import summarize_nbytes, summarize_quality
from kvant.probing import make_trial, measure_divergence, resolve_auto
from kvant.probing.divergence import measure_cache_divergence
from kvant.recipes import AnySpec
from pages import DOCS, ROOT
from quality_page import write_page

sys.path.insert(0, str(ROOT / "tests"))  # tests/ is no package

from hf.outliers import scale_key_channels, scale_value_channels

RESULTS_FILE = DOCS / "quality.json"
FORMATS = (
    *("fp8", "affine8", "affine6", "affine5", "affine4", "affine3", "affine2", "affine8v4"),
    *("turbo4v4", "turbo4v3", "turbo4v2", "turbo3v3", "turbo3v2", "turbo2v2"),
)
FORMAT_VARIANTS = ("", ",tail=0", ",sinks=4", ",smooth")
AFFINE_LADDER = ("affine8", "affine6", "affine5", "affine4", "affine3", "affine2")  # without tails
RECIPES: dict[str, tuple[str, ...]] = {
    "a dense tail": ("affine4,tail=64", "affine4,tail=128", "affine4,tail=256"),
    "sinks": ("affine4,tail=0,sinks=4", "affine4,tail=0,sinks=16", "turbo4v2,tail=0,sinks=4"),
    "edge layers in 8 bits": ("affine4,tail=0,edge=1", "affine3,tail=0,edge=1"),
    "keys wider": ("affine8v4,tail=0", "affine5/affine3,tail=0", "turbo4v2,tail=0"),
    "values wider": ("affine4/affine8,tail=0", "affine3/affine5,tail=0", "turbo2/turbo4,tail=0"),
    "smaller, larger groups": (
        *("affine4,tail=0,group=16", "affine4,tail=0,group=64", "affine3,tail=0,group=64"),
        *("affine2,tail=0,group=32", "affine2,tail=0,group=64"),
    ),
    "rotation": ("affine4,tail=0,rotate", "affine3,tail=0,rotate", "affine2,tail=0,rotate"),
    "rotation and larger groups": (
        *("affine4,tail=0,rotate,group=64", "affine3,tail=0,rotate,group=64"),
        "affine2,tail=0,rotate,group=64",
    ),
    "channel scales": ("affine4,tail=0,smooth", "affine3,tail=0,smooth", "turbo4v2,tail=0,smooth"),
    "rotation, the codebook": ("turbo4v4,tail=0", "turbo3v3,tail=0", "turbo2v2,tail=0"),
    "a float of 8 bits": ("fp8", "fp8,rotate"),
}
SCALE_FORMATS = ("affine8", "affine4", "affine3", "affine2", "turbo4v4", "turbo3v3", "turbo2v2")
HEAVY_FORMATS = (
    *("affine8", "affine4", "affine4,rotate", "turbo4v4"),
    *("affine8,smooth", "affine4,smooth"),
)
SINK_FORMATS = tuple(map("".join, product(("affine8", "affine4", "turbo4v2"), ("", ",sinks=4"))))
TOKENS, CONTEXT, SEED = 8192, 2048, 0
RANGE_SHARES = tuple(1 - step / 20 for step in range(9))  # of a searched scale
NUM_PEER_PIECES, PEER_CONTEXT = 2, 1024
TIMED_LENGTH, REPEATS = 1536, 31  # tokens in the cache, and timed tokens
BASELINE = "transformers"  # its DynamicCache, without quantization
PEER_CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "quanto, 4 bits": ("quanto", {"nbits": 4}),
    "quanto, 2 bits": ("quanto", {"nbits": 2}),
    "hqq, 8 bits": ("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1}),
    "hqq, 4 bits": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "fp8 of transformers": ("fp8", {}),
}
COMPARED_FORMATS = (
    *("affine8", "fp8", "affine4,group=64,tail=0", "turbo4v4,tail=0"),
    *("affine4,group=64", "affine4", "affine4,smooth", "turbo4v4"),
    *("affine2,group=64,tail=0", "turbo2,tail=0", "turbo2"),
)


@dataclass(frozen=True)
class SearchedAffine(Affine):
    """`Affine` with searched scales, which was worse than fitting them (docs/quality.md).

    It tries narrower ranges of each group, from the full range down to six tenths, and takes the
    one with the least squared error. It decodes as its parent does.
    """

    def _seal_groups(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = saturate(x)
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        best: tuple[Tensor, ...] | None = None
        for share in RANGE_SHARES:
            candidate = self._quantize_range(x, (low + high) / 2, (high - low) / 2 * share)
            if best is None:
                best = candidate
            is_better = candidate[0] < best[0]
            best = tuple(
                map(lambda new, old, b=is_better: new.where(is_better, old), candidate, best)
            )
        _, codes, scale, bias = best
        return codes.to(torch.uint8).flatten(-2), scale.squeeze(-1), bias.squeeze(-1)

    def _quantize_range(self, x: Tensor, middle: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        """Return squared error, codes, scale and bias for a range around the middle."""
        bias = (middle - half).half()
        scale = (2 * half / (2**self.bits - 1)).half()
        step = scale.float()
        codes = ((x - bias.float()) / step.where(step > 0, 1.0)).round().clamp(0, 2**self.bits - 1)
        error = (codes * step + bias.float() - x).square().sum(-1, keepdim=True)
        return error, codes, scale, bias


class QuantizerUnavailable(Exception):
    """Reason why a peer is skipped."""


def list_measurements(models: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the table, the model and the format of each result."""
    variants = [form + variant for form in FORMATS for variant in FORMAT_VARIANTS]
    ladder = [f"{form},tail=0" for form in AFFINE_LADDER]
    yield from product(["formats"], ["plain", "30x", "100x"], ["raw", *variants])
    yield from product(["recipes"], ["plain"], [*ladder, *chain(*RECIPES.values())])
    yield from product(["scales"], ["plain"], SCALE_FORMATS)
    yield from product(["values"], ["values 30x"], HEAVY_FORMATS)
    yield from product(["sinks"], ["rows alone"], SINK_FORMATS)
    yield from product(["auto"], models, ["auto"])
    yield from product(["peers"], ["plain", "30x"], [*PEER_CACHES, *COMPARED_FORMATS])
    yield "speed", "plain", "all"


def main() -> None:
    bf16_model, tokenizer = load(None, device="cpu")
    plain = bf16_model.float()
    models: dict[str, Any] = {
        "plain": plain,
        "30x": scale_key_channels(plain, 30.0),
        "100x": scale_key_channels(plain, 100.0),
        "values 30x": scale_value_channels(plain, 30.0),
    }
    pieces = split_text(tokenizer, None, CONTEXT, TOKENS).pieces
    measures: dict[str, Callable[[Any, str], Mapping[str, Any]]] = {
        **dict.fromkeys(
            ("formats", "recipes", "values"),
            lambda model, form: measure_format(model, pieces, form),
        ),
        "scales": lambda model, form: measure_scales(model, pieces, form),
        "sinks": lambda model, form: measure_sinks(form),
        "auto": lambda model, form: measure_auto(model, tokenizer, pieces),
        "peers": lambda model, form: measure_peer(model, pieces, form),
        "speed": lambda model, form: {"steps": measure_steps(tokenizer)},
    }
    content = json.loads(RESULTS_FILE.read_text()) if RESULTS_FILE.exists() else {}
    facts = content.get("facts", {}) | {"machine": describe_machine()}
    rows: list[dict[str, Any]] = content.get("rows", [])
    for table, name, form in list_measurements(models):
        names = {"table": table, "model": name, "format": form}
        if any(names.items() <= row.items() for row in rows):
            continue
        show_progress(f"{table}, {name}: {form}")
        try:
            rows.append(names | dict(measures[table](models.get(name), form)))
        except QuantizerUnavailable as error:
            print(f"skipped: {error}")
            continue
        text = json.dumps({"facts": facts, "rows": rows}, indent=1)
        RESULTS_FILE.write_text(text + "\n", encoding="utf-8")
    show_progress("")
    write_page(rows)


def measure_format(model: Any, pieces: tuple[Tensor, ...], spec: AnySpec) -> dict[str, Any]:
    sizes = summarize_nbytes(model, spec)
    return summarize_quality(measure_divergence(model, pieces, spec), SEED) | {
        "of_raw": sizes["row_nbytes"] / sizes["raw_row_nbytes"],
        **{
            f"of_raw_{length}": nbytes / sizes["raw_nbytes"][length]
            for length, nbytes in sizes["nbytes"].items()
        },
    }


def measure_scales(model: Any, pieces: tuple[Tensor, ...], form: str) -> dict[str, Any]:
    """Measure first, fitted and searched scales, without a tail."""
    fitted = kvant.parse(f"{form},tail=0", model.config.num_hidden_layers)

    def measure(change: Callable[[Any], Codec]) -> dict[str, float]:
        spec = fitted.map_layers(
            lambda layer: replace(layer, keys=change(layer.keys), values=change(layer.values))
        )
        divergence = measure_divergence(model, pieces, spec)
        return {"mean_kl": divergence.mean_kl, "perplexity_change": divergence.perplexity_change}

    changes = {
        "first": lambda codec: replace(codec, corrected=False),
        "fitted": lambda codec: codec,
    }
    if form.startswith("affine"):
        changes["searched"] = lambda codec: SearchedAffine(codec.bits, codec.group, codec.frame)
    return {name: measure(change) for name, change in changes.items()}


def measure_sinks(form: str) -> dict[str, Any]:
    """Measure the output error for random rows whose first four take most attention."""
    generator = torch.Generator().manual_seed(SEED)
    keys, values, noise = torch.randn(3, 1, 4, CONTEXT, 64, generator=generator)
    direction = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    queries = noise[:, :, :128] + 8 * direction
    keys[:, :, :4] += 10 * direction
    values[:, :, :4] *= 0.05  # the values of sinks are small
    cache, raw = (kvant.Cache(1, f"{spec},tail=0,prefill=stored") for spec in (form, "raw"))
    raw_output, output = (kvant.attend(queries, c[0].append(keys, values)) for c in (raw, cache))
    visible = torch.ones(128, CONTEXT, dtype=torch.bool).tril(CONTEXT - 128)
    scores = (queries @ keys.transpose(2, 3) / 8).masked_fill(~visible, -torch.inf).softmax(-1)
    return {
        "share": float(scores[..., :4].sum(-1).mean()),
        "norm": float(keys[:, :, :4].norm(dim=-1).mean() / keys[:, :, 4:].norm(dim=-1).mean()),
        "error": float((output - raw_output).norm() / raw_output.norm()),
    }


def measure_auto(model: Any, tokenizer: Any, pieces: tuple[Tensor, ...]) -> dict[str, Any]:
    """Measure the spec that `auto` chooses on its short text."""
    spec = resolve_auto(model, "auto", make_trial(model, tokenizer))
    return {"chosen": spec} | measure_format(model, pieces, spec)


def make_cache_factory(model: Any, name: str) -> Callable[[], Any]:
    backend, options = PEER_CACHES[name]
    if backend in ("quanto", "hqq") and not find_spec("optimum" if backend == "quanto" else "hqq"):
        raise QuantizerUnavailable(f"{name}: pip install kvant[peers]")
    return lambda: QuantizedCache(backend, model.config, **options)


def measure_peer(model: Any, pieces: tuple[Tensor, ...], name: str) -> dict[str, Any]:
    short_pieces = [piece[:, :PEER_CONTEXT] for piece in pieces[:NUM_PEER_PIECES]]
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
        name: make() for name, make in make_candidates(model, ("raw", *COMPARED_FORMATS)).items()
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


if __name__ == "__main__":
    main()
