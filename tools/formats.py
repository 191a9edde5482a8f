"""Compares the formats on the model inside, and writes docs/benchmarks/formats.md and .json.

A few minutes: `python tools/formats.py`. What a format does to the model is the divergence of its
next-token distribution from that of the model without a cache, in float32, at every position of
files that the model was not trained on; prompts are read as stored (`prefill=stored`), so that
every token sees what it would see in decoding. Speed is that of whole generations in bfloat16, a
token of each format in turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from kvant import demo
from kvant.bench.candidates import make_candidates, make_dynamic
from kvant.bench.markdown import format_markdown
from kvant.bench.report import describe_machine
from kvant.bench.speed import measure_generations
from kvant.demo import held_out

DOC_PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "formats.md"
EIGHT_BITS = ("affine8", "fp8")
FORMATS = ("raw", *EIGHT_BITS, "affine6", "affine8v4", "affine4", "turbo4v4", "turbo4v2", "turbo3")
TEXT_LENGTH, NUM_TEXTS, PREFILL_CHUNK = 2048, 8, 512
PROMPT_TOKENS, NEW_TOKENS, NUM_RUNS = 1024, 512, 3
EXAMPLE_SHAPE = kvant.Shape(1, 8, 128, 128)  # a layer of many real models
INTRO = """# The formats, on the model inside

Made by `python tools/formats.py` on {machine}.

* **bytes a token**: sealed rows of one layer with 8 heads of 128, as `kvant.plan` counts them.
* **KL**: how far the next-token distribution is from that of the model without a cache, in nats:
  the mean over {positions} positions of {texts} files that the model was not trained on, and what
  999 of 1000 stay below. **top-1**: how often the likeliest token stays the same.
* **tokens a second**: {tokens} tokens generated after {prompt}, bfloat16, median of {runs} runs in
  turn; `vs transformers` is that over its own cache in the same run.

"""


def encode_texts(tokenizer: Any) -> Iterator[Tensor]:
    """The beginnings of the longest files that are held out."""
    for text in sorted(held_out(), key=len)[-NUM_TEXTS:]:
        ids = tokenizer.encode(text)[:TEXT_LENGTH]
        yield torch.tensor([ids])


@torch.no_grad()
def compute_logprobs(model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    """[tokens, vocabulary], with what a cache makes of it."""
    if cache is None:
        return model(ids, use_cache=False).logits[0].log_softmax(-1)
    parts = [model(part, past_key_values=cache).logits[0] for part in ids.split(PREFILL_CHUNK, 1)]
    return torch.cat(parts).log_softmax(-1)


def measure_divergence(
    model: Any, spec: str, ids: list[Tensor], expected_logprobs: list[Tensor]
) -> dict[str, Any]:
    found, same = [], []
    for text, expected in zip(ids, expected_logprobs, strict=True):
        got = compute_logprobs(model, text, kvant.cache_for(model, f"{spec},prefill=stored"))
        found.append((expected.exp() * (expected - got)).sum(-1))
        same.append(expected.argmax(-1) == got.argmax(-1))
    every = torch.cat(found)
    return {
        "KL": f"{max(0.0, float(every.mean())):.2g}",
        "KL, 999 in 1000": f"{float(every.quantile(0.999)):.2g}",
        "top-1": f"{float(torch.cat(same).float().mean()):.1%}",
    }


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    model = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()
    ids = list(encode_texts(tokenizer))
    right = [compute_logprobs(model, text) for text in ids]
    quality = {spec: measure_divergence(model, spec, ids, right) for spec in FORMATS}
    half = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.bfloat16).eval()
    makes = make_candidates(half, FORMATS) | {"transformers": make_dynamic(half)}
    speeds = measure_generations(makes, ids[-1][0].tolist()[:PROMPT_TOKENS], NEW_TOKENS, NUM_RUNS)
    found = {row["cache"]: row for row in speeds}
    raw = kvant.plan(EXAMPLE_SHAPE, "raw").nbytes_per_token
    rows = []
    for spec in FORMATS:
        nbytes = kvant.plan(EXAMPLE_SHAPE, spec).nbytes_per_token
        row = {
            "format": f"`{spec}`",
            "bytes a token": f"{nbytes:.0f}",
            "of raw": f"{nbytes / raw:.3g}",
        }
        row |= quality[spec]
        row |= {
            "tokens a second": found[spec]["tokens_s"],
            "vs transformers": found[spec]["vs_transformers"],
        }
        rows.append(row)
    told = describe_machine()
    facts = {
        "machine": f"{told['processor']}, {told['threads']} threads, torch {told['torch']}",
        "positions": sum(text.shape[1] for text in ids),
        "texts": len(ids),
    }
    intro = INTRO.format(**facts, tokens=NEW_TOKENS, prompt=PROMPT_TOKENS, runs=NUM_RUNS)
    DOC_PAGE.write_text(intro + format_markdown(rows) + "\n", encoding="utf-8")
    line = json.dumps({"bench": "formats", "machine": told, **facts, "rows": rows})
    DOC_PAGE.with_suffix(".json").write_text(line + "\n", encoding="utf-8")
    print(format_markdown(rows))


if __name__ == "__main__":
    main()
