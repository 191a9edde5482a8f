"""Compare the formats on the built-in model, and write docs/benchmarks/formats.md and .json.

`python tools/formats.py` takes a few minutes. The quality of a format is the divergence of its
next-token distribution from that of the model without a cache, in float32, at every position of
files that the model was not trained on. Prompts are read with `prefill=stored`, so that every token
sees what decoding would see. Speed is that of whole generations in bfloat16, a token of each format
in turn.
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
from kvant.demo import load_held_out_texts

DOC_PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "formats.md"
EIGHT_BITS = ("affine8", "fp8")
FORMATS = ("raw", *EIGHT_BITS, "affine6", "affine8v4", "affine4", "turbo4v4", "turbo4v2", "turbo3")
TEXT_LENGTH, NUM_TEXTS, PREFILL_CHUNK = 2048, 8, 512
PROMPT_TOKENS, NEW_TOKENS, NUM_RUNS = 1024, 512, 3
EXAMPLE_SHAPE = kvant.Shape(1, 8, 128, 128)  # a layer of many real models
INTRO = """# The formats, on the bundled model

Made by `python tools/formats.py` on {machine}.

* **bytes a token**: sealed rows of one layer with 8 heads of 128, as `kvant.plan` counts them.
* **KL**: divergence of the next-token distribution from the model without a cache, in nats:
  the mean over {positions} positions of {texts} files outside the training set, and the 99.9th
  percentile. **top-1**: how often the most likely token stays the same.
* **tokens a second**: {tokens} tokens after {prompt}, bfloat16, median of {runs} interleaved runs.
  `vs transformers` is relative to its own cache in the same run.

"""


def encode_texts(tokenizer: Any) -> Iterator[Tensor]:
    """Yield the beginnings of the longest held-out files."""
    for text in sorted(load_held_out_texts(), key=len)[-NUM_TEXTS:]:
        ids = tokenizer.encode(text)[:TEXT_LENGTH]
        yield torch.tensor([ids])


@torch.no_grad()
def compute_logprobs(model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    """Return log-probabilities [tokens, vocabulary], with a cache if one is given."""
    if cache is None:
        return model(ids, use_cache=False).logits[0].log_softmax(-1)
    parts = [model(part, past_key_values=cache).logits[0] for part in ids.split(PREFILL_CHUNK, 1)]
    return torch.cat(parts).log_softmax(-1)


def measure_divergence(
    model: Any, spec: str, ids: list[Tensor], expected_logprobs: list[Tensor]
) -> dict[str, Any]:
    divergences, same = [], []
    for text, expected in zip(ids, expected_logprobs, strict=True):
        logprobs = compute_logprobs(model, text, kvant.cache_for(model, f"{spec},prefill=stored"))
        divergences.append((expected.exp() * (expected - logprobs)).sum(-1))
        same.append(expected.argmax(-1) == logprobs.argmax(-1))
    kl = torch.cat(divergences)
    return {
        "KL": f"{max(0.0, float(kl.mean())):.2g}",
        "KL, 999 in 1000": f"{float(kl.quantile(0.999)):.2g}",
        "top-1": f"{float(torch.cat(same).float().mean()):.1%}",
    }


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    model = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()
    ids = list(encode_texts(tokenizer))
    raw_logprobs = [compute_logprobs(model, text) for text in ids]
    quality = {spec: measure_divergence(model, spec, ids, raw_logprobs) for spec in FORMATS}
    bf16_model = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.bfloat16).eval()
    makes = make_candidates(bf16_model, FORMATS) | {"transformers": make_dynamic(bf16_model)}
    speeds = measure_generations(makes, ids[-1][0].tolist()[:PROMPT_TOKENS], NEW_TOKENS, NUM_RUNS)
    speeds_by_cache = {row["cache"]: row for row in speeds}
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
            "tokens a second": speeds_by_cache[spec]["tokens_s"],
            "vs transformers": speeds_by_cache[spec]["vs_transformers"],
        }
        rows.append(row)
    machine = describe_machine()
    facts = {
        "machine": "{processor}, {threads} threads, torch {torch}".format_map(machine),
        "positions": sum(text.shape[1] for text in ids),
        "texts": len(ids),
    }
    intro = INTRO.format(**facts, tokens=NEW_TOKENS, prompt=PROMPT_TOKENS, runs=NUM_RUNS)
    DOC_PAGE.write_text(intro + format_markdown(rows) + "\n", encoding="utf-8")
    line = json.dumps({"bench": "formats", "machine": machine, **facts, "rows": rows})
    DOC_PAGE.with_suffix(".json").write_text(line + "\n", encoding="utf-8")
    print(format_markdown(rows))


if __name__ == "__main__":
    main()
