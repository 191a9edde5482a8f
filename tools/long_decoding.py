"""Measure what formats do to thousands of generated tokens, by position: docs/long-decoding.json.

`python tools/long_decoding.py --minutes 60` measures for an hour; the same command goes on. For
each text, the raw cache continues 512 tokens by 4,096, sampled with a seed. Then each format reads
the same tokens beside raw, and the distributions of the next token are compared in blocks of 512.
Caches have `prefill=stored`, so a chunk sees rows, and selects pages, as decoding does; a format
that prunes reads single tokens, since it may prune again after each.

From the end of each block, both continue greedily by 64 tokens: `identical` counts those before the
first that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

import kvant
from exam_options import check_context, parse_formats
from forked_batch import continue_greedily
from kvant.bench import harness
from kvant.checkpoints import load
from kvant.eval.evaluation import split_text
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache
from kvant.prefixes.tree import count_shared_prefix
from kvant.probing import Divergence
from kvant.probing.divergence import (
    MAX_FORWARD_TOKENS,
    compare_logits,
    compute_logits,
    make_empty_cache,
    read_prompt,
)
from pages import DOCS
from result_log import ResultLog, Row
from texts import TEXTS, load_text

FORMATS = (
    "affine8,fp8,affine6,affine4,affine4,tail=0,affine3,affine2,turbo4v4,turbo3v3,turbo2v2,"
    "affine8,window=1024,affine8,window=2048,affine8,select=25%,affine8,select=12%"
)
PROMPT, BLOCK, GREEDY = 512, 512, 64  # tokens
TEMPERATURE, TOP_P, SEED = 1.0, 0.95, 0


class Block(NamedTuple):
    """A block of generated tokens, and what continues it."""

    divergence: Divergence
    caches: tuple[TransformersCache, TransformersCache]  # raw's and the format's, forked at its end
    logits: tuple[Tensor, Tensor]  # [vocabulary], after its last token


class DecodingTest:
    """Generates the tokens of a text once, and measures formats on them."""

    def __init__(
        self, model: Any, tokenizer: Any, texts: Mapping[str, str], log: ResultLog, num_tokens: int
    ) -> None:
        self._decoder, self._tokenizer = TransformersDecoder(model), tokenizer
        self._texts, self._log, self._num_tokens = texts, log, num_tokens
        check_context(self._decoder, PROMPT + num_tokens + GREEDY)

    def measure(self, key: Mapping[str, Any]) -> Row:
        return (
            {"tokens": self._generate(key["text"])}
            if key["format"] == "raw"
            else self._compare(key["text"], key["format"])
        )

    def _generate(self, text: str) -> list[int]:
        """Return the prompt and its continuation."""
        (piece,) = split_text(self._tokenizer, self._texts[text], PROMPT, PROMPT).pieces
        prompt: list[int] = piece[0].tolist()
        steps = kvant.generate(
            self._decoder.model,
            self._tokenizer,
            prompt,
            max_new_tokens=self._num_tokens,
            ignore_end=True,
            temperature=TEMPERATURE,
            top_p=TOP_P,
            seed=SEED,
        )
        return prompt + [step.token for step in steps]

    def _compare(self, text: str, spec: str) -> Row:
        generated = self._log.find({"text": text, "format": "raw"})
        assert generated is not None
        blocks = [*self._read_blocks(torch.tensor([generated["tokens"]]), spec)]
        raw, other = (
            continue_greedily(
                self._decoder,
                [block.caches[side] for block in blocks],
                torch.stack([block.logits[side] for block in blocks]),
                GREEDY,
            )
            for side in (0, 1)
        )
        return {
            "kl": [_round(block.divergence.mean_kl) for block in blocks],
            "p99_kl": [_round(block.divergence.quantile(0.99)) for block in blocks],
            "top1": [_round(block.divergence.top1) for block in blocks],
            "identical": [*map(count_shared_prefix, raw, other)],
        }

    def _read_blocks(self, ids: Tensor, spec: str) -> Iterator[Block]:
        """Read the same tokens with raw and with a spec."""
        model = self._decoder.model
        caches = make_empty_cache(model, "raw"), make_empty_cache(model, spec)
        for cache in caches:
            read_prompt(model, ids[:, :PROMPT], cache)
        caches[1].prune()
        chunk = 1 if caches[1].spec.prunes else MAX_FORWARD_TOKENS
        count = ids.shape[1] - 1  # the last token is only predicted
        for begin in range(PROMPT, count, BLOCK):
            parts = []
            stop = min(begin + BLOCK, count)
            for start in range(begin, stop, chunk):
                chunk_stop = min(start + chunk, stop)
                raw_logits, logits = (
                    compute_logits(model, ids[:, start:chunk_stop], cache) for cache in caches
                )
                targets = ids[0, start + 1 : chunk_stop + 1]
                parts.append(compare_logits(raw_logits, logits, targets))
            yield Block(
                Divergence.concatenate(parts),
                (caches[0].fork(), caches[1].fork()),
                (raw_logits[-1], logits[-1]),
            )


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def summarize(rows: Iterable[Row]) -> list[Row]:
    """Return a line for each format: means over texts, of the first and the last block and all."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "kl" in row:
            groups.setdefault(row["format"], []).append(row)
    return [
        {
            "format": name,
            "texts": len(group),
            "first KL": f"{fmean(row['kl'][0] for row in group):.2g}",
            "last KL": f"{fmean(row['kl'][-1] for row in group):.2g}",
            "top-1": fmean(fmean(row["top1"]) for row in group),
            "identical": fmean(fmean(row["identical"]) for row in group),
        }
        for name, group in groups.items()
    ]


def main(
    model: harness.Model = "smollm2",
    formats: Annotated[str, typer.Option(help="Comma-separated specs")] = FORMATS,
    texts: Annotated[str, typer.Option(help="Texts of tools/texts.py")] = ",".join(TEXTS),
    tokens: Annotated[int, typer.Option(min=BLOCK, help="Tokens to generate")] = 4096,
    minutes: Annotated[float, typer.Option(help="No row is begun after these")] = 60,
    output: Annotated[Path, typer.Option(help="JSON file to continue")] = DOCS
    / "long-decoding.json",
) -> None:
    """Measure the divergence of formats over a long generation."""
    log = ResultLog.open(output, {"model": model, "tokens": tokens, "seed": SEED})
    loaded, tokenizer = load(model, device="cpu", dtype="float32")
    contents = {name: load_text(name) for name in texts.split(",")}
    test = DecodingTest(loaded, tokenizer, contents, log, tokens)
    names = ["raw", *parse_formats(loaded, formats)]
    keys = [{"text": text, "format": name} for text, name in product(contents, names)]
    log.measure(keys, test.measure, minutes)
    if lines := summarize(log.rows):
        harness.print_table("long decoding", lines)


if __name__ == "__main__":
    harness.run(main)
