"""Measure what formats do to thousands of generated tokens, by position: docs/long-decoding.json.

`python tools/long_decoding.py --minutes 60` measures for an hour; the same command goes on. For
each text, the raw cache continues 512 tokens by 4,096, sampled with a seed. Then five formats at a
time read the same tokens, with one raw cache, and the distributions of the next token are compared
in blocks of 512.
Caches have `prefill=stored`, so a chunk sees rows, and selects pages, as decoding does; a format
that prunes reads single tokens, since it may prune again after each.

From the end of each block, both continue greedily by 64 tokens: `identical` counts those before the
first that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

import kvant
from exam_model import load_float32
from exam_options import check_context, parse_formats
from forked_batch import continue_greedily
from kvant.bench import harness
from kvant.eval.evaluation import split_text
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache
from kvant.prefixes.tree import count_shared_prefix
from kvant.probing import Divergence
from kvant.probing.divergence import (
    MAX_FORWARD_TOKENS,
    compare_predictions,
    compute_logits,
    make_empty_cache,
    make_stored_prefill_spec,
    read_prompt,
)
from pages import DOCS
from result_log import ResultLog, Row
from texts import TEXTS, compute_digests, load_text

FORMATS = (
    "affine8,fp8,affine6,affine4,affine4,tail=0,affine3,affine2,turbo4v4,turbo3v3,turbo2v2,"
    "affine8,window=1024,affine8,window=2048,affine8,select=25%,affine8,select=12%"
)
PROMPT, BLOCK, GREEDY = 512, 512, 64  # tokens
TEMPERATURE, TOP_P, SEED = 1.0, 0.95, 0
FORMATS_AT_ONCE = 5  # beside one raw cache: bounds the memory


class BlockEnd(NamedTuple):
    """What continues a block."""

    cache: TransformersCache
    logits: Tensor  # [vocabulary], after its last token


class BlockReader:
    """A cache that reads a text block by block."""

    def __init__(self, model: Any, spec: str, prompt: Tensor) -> None:
        self._model = model
        self.cache = make_empty_cache(model, spec)
        self._logits = read_prompt(model, prompt, self.cache)
        self.cache.prune()
        self.ends: list[BlockEnd] = []

    def read(self, ids: Tensor) -> Tensor:
        """Append tokens [1, T]; return their logits [T, vocabulary]."""
        logits = compute_logits(self._model, ids, self.cache)
        self._logits = logits[-1].clone()  # a view would keep the logits of all tokens
        return logits

    def end_block(self) -> None:
        self.ends.append(BlockEnd(self.cache.fork(), self._logits))


class DecodingTest:
    """Generates the tokens of a text once, and measures formats on them."""

    def __init__(
        self, model: Any, tokenizer: Any, texts: Mapping[str, str], log: ResultLog, num_tokens: int
    ) -> None:
        self._decoder, self._tokenizer = TransformersDecoder(model), tokenizer
        self._texts, self._log, self._num_tokens = texts, log, num_tokens
        check_context(self._decoder, PROMPT + num_tokens + GREEDY)

    def list_groups(self, formats: Sequence[str]) -> Iterator[list[Row]]:
        """Yield the keys of rows that are measured together: one text, and an equal chunk."""
        model = self._decoder.model
        prunes = {name: make_stored_prefill_spec(model, name).prunes for name in formats}
        for text in self._texts:
            yield [{"text": text, "format": "raw"}]
            for is_pruned in (False, True):
                names = [n for n in formats if n != "raw" and prunes[n] is is_pruned]
                for begin in range(0, len(names), FORMATS_AT_ONCE):
                    group = names[begin : begin + FORMATS_AT_ONCE]
                    yield [{"text": text, "format": name} for name in group]

    def measure(self, keys: Sequence[Mapping[str, Any]]) -> list[Row]:
        """Return the rows of a group: the tokens of raw, or what formats do to them."""
        text, names = keys[0]["text"], [key["format"] for key in keys]
        return (
            [{"tokens": self._generate(text)}] if names == ["raw"] else self._compare(text, names)
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

    def _compare(self, text: str, specs: Sequence[str]) -> list[Row]:
        generated = self._log.find({"text": text, "format": "raw"})
        assert generated is not None
        ids = torch.tensor([generated["tokens"]])
        readers = [BlockReader(self._decoder.model, s, ids[:, :PROMPT]) for s in ("raw", *specs)]
        blocks = [*self._read_blocks(readers, ids)]
        raw, *others = map(self._continue, readers)
        return [
            {
                "kl": [_round(divergence.mean_kl) for divergence in divergences],
                "p99_kl": [_round(divergence.quantile(0.99)) for divergence in divergences],
                "top1": [_round(divergence.top1) for divergence in divergences],
                "identical": [*map(count_shared_prefix, raw, other)],
            }
            for divergences, other in zip(zip(*blocks, strict=True), others, strict=True)
        ]

    def _read_blocks(
        self, readers: Sequence[BlockReader], ids: Tensor
    ) -> Iterator[list[Divergence]]:
        """Let all read the tokens after the prompt; yield the divergences of each block."""
        raw, *others = readers
        chunk = 1 if any(reader.cache.spec.prunes for reader in others) else MAX_FORWARD_TOKENS
        count = ids.shape[1] - 1  # the last token is only predicted
        for begin in range(PROMPT, count, BLOCK):
            block = ids[:, begin : min(begin + BLOCK, count) + 1]
            parts = compare_predictions(raw.read, [other.read for other in others], block, chunk)
            yield [*map(Divergence.concatenate, zip(*parts, strict=True))]
            for reader in readers:
                reader.end_block()

    def _continue(self, reader: BlockReader) -> list[list[int]]:
        """Return the greedy continuation of each block."""
        caches, logits = zip(*reader.ends, strict=True)
        return continue_greedily(self._decoder, caches, torch.stack(logits), GREEDY)


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
    contents = {name: load_text(name) for name in texts.split(",")}
    lengths = {"tokens": tokens, "prompt": PROMPT, "block": BLOCK, "greedy": GREEDY}
    sampling = {"temperature": TEMPERATURE, "top_p": TOP_P, "seed": SEED}
    log = ResultLog.open(output, {"model": model} | lengths | sampling | compute_digests())
    loaded, tokenizer = load_float32(model)
    test = DecodingTest(loaded, tokenizer, contents, log, tokens)
    log.measure_groups(test.list_groups(parse_formats(loaded, formats)), test.measure, minutes)
    if lines := summarize(log.rows):
        harness.print_table("long decoding", lines)


if __name__ == "__main__":
    harness.run(main)
