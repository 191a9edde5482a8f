"""Compare the formats on the built-in model, and write docs/benchmarks/formats.json.

`python tools/formats.py` takes a few minutes and prints the table of README.md. The quality of a
format is the divergence of its next-token distribution from that of a raw cache, in float32, at
every position of files that the model was not trained on; every token sees what decoding would
see. Speed is that of whole generations in bfloat16, a token of each format in turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import kvant
from kvant.bench.decode import make_candidates, make_dynamic, measure_generations
from kvant.bench.harness import describe_machine
from kvant.checkpoints import load
from kvant.demo import load_held_out_texts
from kvant.probing import measure_divergence
from pages import DOCS, format_table

RESULTS = DOCS / "benchmarks" / "formats.json"
FORMATS = (
    *("raw", "affine8", "fp8", "affine6", "affine8v4", "affine4"),
    *("turbo4v4", "turbo4v2", "turbo3"),
)
TEXT_LENGTH, NUM_TEXTS = 2048, 8
PROMPT_TOKENS, NEW_TOKENS, NUM_RUNS = 1024, 512, 3
EXAMPLE_SHAPE = kvant.Shape(1, 8, 128, 128)  # a layer of many real models


def encode_texts(tokenizer: Any) -> Iterator[Tensor]:
    """Yield the beginnings of the longest held-out files."""
    for text in sorted(load_held_out_texts(), key=len)[-NUM_TEXTS:]:
        ids = tokenizer.encode(text)[:TEXT_LENGTH]
        yield torch.tensor([ids])


def main() -> None:
    bf16_model, tokenizer = load(None, device="cpu")
    ids = list(encode_texts(tokenizer))
    makes = make_candidates(bf16_model, FORMATS) | {"transformers": make_dynamic(bf16_model)}
    speeds = measure_generations(makes, ids[-1][0].tolist()[:PROMPT_TOKENS], NEW_TOKENS, NUM_RUNS)
    speeds_by_cache = {row["cache"]: row for row in speeds}
    model = bf16_model.float()
    raw = kvant.plan(EXAMPLE_SHAPE, "raw").nbytes_per_token
    rows = []
    for spec in FORMATS:
        nbytes = kvant.plan(EXAMPLE_SHAPE, spec).nbytes_per_token
        divergence = measure_divergence(model, ids, spec)
        rows.append(
            {
                "format": f"`{spec}`",
                "bytes a token": f"{nbytes:.0f}",
                "of raw": f"{nbytes / raw:.3g}",
                "KL": f"{divergence.mean_kl:.2g}",
                "KL, 999 in 1000": f"{divergence.quantile(0.999):.2g}",
                "top-1": f"{divergence.top1:.1%}",
                "tokens a second": speeds_by_cache[spec]["tokens_s"],
                "vs transformers": speeds_by_cache[spec]["vs_transformers"],
            }
        )
    machine = describe_machine()
    facts = {
        "machine": "{processor}, {threads} threads, torch {torch}".format_map(machine),
        "positions": divergence.num_positions,
        "texts": len(ids),
    }
    line = json.dumps({"bench": "formats", "machine": machine, **facts, "rows": rows})
    RESULTS.write_text(line + "\n", encoding="utf-8")
    print(format_table(rows))


if __name__ == "__main__":
    main()
