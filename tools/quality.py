"""Measures what formats do to the model inside, plain and with outliers: docs/quality.json.

A quarter of an hour: `python tools/quality.py`; what is there already is not measured again. In
float32, on texts that the model was not trained on, with the code of `kvant eval`. Models with
outliers compute the same function; a few channels of their keys are 30 or 100 times as large.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvant import demo
from kvant.bench.report import machine, progress
from kvant.eval.outliers import with_outliers
from kvant.eval.result import quality, size
from kvant.eval.text import cut
from kvant.probing import damage

FOUND = Path(__file__).resolve().parent.parent / "docs" / "quality.json"
FORMATS = (
    *("fp8", "affine8", "affine6", "affine5", "affine4", "affine3", "affine2", "affine8v4"),
    *("turbo4v4", "turbo4v3", "turbo4v2", "turbo3v3", "turbo3v2", "turbo2v2"),
)
VARIANTS = ("", ",tail=0", ",sinks=4", ",smooth")
MODELS = {"plain": 1.0, "30x": 30.0, "100x": 100.0}
TOKENS, CONTEXT, SEED = 8192, 2048, 0


def figures(model: Any, pieces: Any, spec: str) -> dict[str, Any]:
    told = quality(damage(model, pieces, spec), SEED)
    took = size(model, spec)
    return told | {"of_raw": took["row_nbytes"] / took["raw_row_nbytes"], **took["nbytes"]}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    plain = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()
    pieces = cut(tokenizer, None, CONTEXT, TOKENS).pieces
    specs = ["raw", *(f"{form}{variant}" for form in FORMATS for variant in VARIANTS)]
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {"machine": machine(), "rows": []}
    there = {(row["model"], row["format"]) for row in found["rows"]}
    for name, factor in MODELS.items():
        model = with_outliers(plain, factor)
        for spec in specs:
            if (name, spec) in there:
                continue
            progress(f"{name}: {spec}")
            found["rows"].append({"model": name, "format": spec, **figures(model, pieces, spec)})
            FOUND.write_text(json.dumps(found, indent=1) + "\n")
    progress("")


if __name__ == "__main__":
    main()
