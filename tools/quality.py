"""Measure what formats do to the built-in model, for docs/quality.json and docs/quality.md.

`python tools/quality.py` takes half an hour; rows in the file are not measured again. The model
runs in float32, on texts that it was not trained on, with the code of `kvant eval`; bytes are those
of bf16. Models with outliers compute the same function, with a few channels of their keys or values
scaled by 30 or 100. The peers of `pip install kvant[peers]` are measured if they are installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvant
import peers
from kvant.bench.report import describe_machine, show_progress
from kvant.checkpoints import load
from kvant.contracts import Codec
from kvant.eval.evaluation import split_text
from kvant.eval.outliers import scale_key_channels, scale_value_channels
from kvant.eval.result import summarize_nbytes, summarize_quality
from kvant.probing import make_trial, measure_divergence, resolve_auto
from kvant.recipes import AnySpec
from quality_page import write_page
from searched import SearchedAffine

RESULTS_FILE = Path(__file__).resolve().parent.parent / "docs" / "quality.json"
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
    "affine8",
    "affine4",
    "affine4,rotate",
    "turbo4v4",
    "affine8,smooth",
    "affine4,smooth",
)
SINK_FORMATS = tuple(
    f"{form}{option}" for form in ("affine8", "affine4", "turbo4v2") for option in ("", ",sinks=4")
)
TOKENS, CONTEXT, SEED = 8192, 2048, 0


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
    results = QualityResults(RESULTS_FILE)
    for name in ("plain", "30x", "100x"):
        for form in (
            "raw",
            *(f"{form}{variant}" for form in FORMATS for variant in FORMAT_VARIANTS),
        ):
            results.add("formats", name, form, lambda m, f: measure_format(models[m], pieces, f))
    for form in (
        *(f"{form},tail=0" for form in AFFINE_LADDER),
        *(form for recipe in RECIPES.values() for form in recipe),
    ):
        results.add("recipes", "plain", form, lambda m, f: measure_format(models[m], pieces, f))
    for form in SCALE_FORMATS:
        results.add("scales", "plain", form, lambda m, f: measure_scales(models[m], pieces, f))
    for form in HEAVY_FORMATS:
        results.add("values", "values 30x", form, lambda m, f: measure_format(models[m], pieces, f))
    for form in SINK_FORMATS:
        results.add("sinks", "rows alone", form, lambda m, f: measure_sinks(f))
    for name in models:
        results.add("auto", name, "auto", lambda m, f: measure_auto(models[m], tokenizer, pieces))
    for name in ("plain", "30x"):
        for form in peers.FORMATS:
            results.add(
                "peers", name, form, lambda m, f: peers.measure_quality(models[m], pieces, f)
            )
    results.add("speed", "plain", "all", lambda m, f: {"steps": peers.measure_steps(tokenizer)})
    show_progress("")
    write_page(results.rows)


class QualityResults:
    """Measured rows, saved to a file after each."""

    def __init__(self, file: Path) -> None:
        self.file = file
        content = json.loads(file.read_text()) if file.exists() else {}
        self.facts = content.get("facts", {}) | {"machine": describe_machine()}
        self.rows: list[dict[str, Any]] = content.get("rows", [])

    def add(
        self, table: str, model: str, form: str, measure: Callable[[str, str], Mapping[str, Any]]
    ) -> None:
        names = {"table": table, "model": model, "format": form}
        if any(names.items() <= row.items() for row in self.rows):
            return
        show_progress(f"{table}, {model}: {form}")
        try:
            figures = measure(model, form)
        except peers.QuantizerUnavailable as error:
            print(f"skipped: {error}")
            return
        self.rows.append(names | dict(figures))
        content = {"facts": self.facts, "rows": self.rows}
        self.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    main()
