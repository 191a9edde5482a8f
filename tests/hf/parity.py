"""A model family run over a text with a kvant cache and with the transformers cache: both must
agree.

Each cell is a family, a format, a batch, a way to prefill, and a way to pass the cache to the
model. Logits of every token but padding are compared.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache

import kvant
from hf.oracle import Oracle, Rows, get_attention_spec
from hf.zoo import FAMILIES, NAMES, Family
from kvant.hf import PairedCache, TransformersCache
from kvant.recipes import CacheSpec, LayerSpec

Batch = Literal[1, 2]  # with two, the first sequence is left-padded
Prefill = Literal["one-shot", "chunked"]
Way = Literal["stock", "attached"]  # a stock model, or one after kvant.attach

FORMATS = ("raw", "affine8", "affine4", "turbo4v4")
BATCHES: tuple[Batch, ...] = (1, 2)
PAGE = 8  # small, so that a short text has several
PADDING = 7
TOLERANCE = 1e-4  # of logits, relative to their spread
PROMPT, TOKENS = 24, 44
# A page sealed inside a chunk would give its queries different `dense_from`, which no dense rows of
# one forward can show: compressed chunks end at page boundaries.
CHUNKS = {"raw": (13, 11), "compressed": (16, 8)}


@dataclass(frozen=True)
class Cell:
    family: str
    format: str
    batch: Batch
    prefill: Prefill
    way: Way

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))

    @property
    def raw(self) -> bool:
        return self.format == "raw"

    @property
    def chunks(self) -> tuple[int, ...]:
        if self.prefill == "one-shot":
            return (PROMPT,)
        return CHUNKS["raw" if self.raw else "compressed"]

    @property
    def spec(self) -> str | LayerSpec:
        return "raw" if self.raw else with_small_pages(self.format)

    def refusal(self) -> str | None:
        """Return why no cache works: the model's own forward fails."""
        alike = self.batch == 2 and self.prefill == "chunked"
        if alike and self.family in ("mamba", "falcon_mamba"):
            return "the model applies the mask of all tokens to the states of a chunk"
        return None


def with_small_pages(spec: str, **changes: Any) -> LayerSpec:
    """Return the spec with pages that a short text fills, sealed as soon as they are full."""
    layer = kvant.parse(spec, 1).layers[0]
    assert isinstance(layer, LayerSpec)
    return replace(layer, **{"page": PAGE, "tail": 0, **changes})


def iterate_cells() -> Iterator[Cell]:
    """Return the whole matrix."""
    axes = (NAMES, FORMATS, BATCHES, ("one-shot", "chunked"), ("stock", "attached"))
    cells = (Cell(*values) for values in itertools.product(*axes))
    return (cell for cell in cells if cell.refusal() is None)


def list_pairwise_cells() -> list[Cell]:
    """Return few cells per family that cover every pair of values of other axes; greedy.

    Families start at different cells, so triples that one family lacks occur in another.
    """
    chosen = []
    for number, name in enumerate(NAMES):
        cells = [cell for cell in iterate_cells() if cell.family == name]
        cells = cells[number % len(cells) :] + cells[: number % len(cells)]
        missing = set().union(*map(_pairs, cells))
        while missing:
            best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
            missing -= _pairs(best)
            chosen.append(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[Any, ...]]:
    names = [field.name for field in fields(cell)]
    return {(a, b, getattr(cell, a), getattr(cell, b)) for a, b in itertools.combinations(names, 2)}


# ---- inputs of a model


@dataclass(frozen=True, eq=False)
class Text:
    """The input of a model: decoder tokens, and encoder inputs."""

    ids: Tensor
    mask: Tensor | None  # None: no padding
    encoder: Mapping[str, Tensor]

    @property
    def real(self) -> Tensor:
        return torch.ones_like(self.ids).bool() if self.mask is None else self.mask.bool()

    @property
    def prompt(self) -> Text:
        mask = None if self.mask is None else self.mask[:, :PROMPT]
        return replace(self, ids=self.ids[:, :PROMPT], mask=mask)


def text_of(family: Family, batch: Batch = 1, tokens: int = TOKENS, seed: int = 3) -> Text:
    inputs = family.inputs(batch, tokens, seed)
    ids = inputs.pop("decoder_input_ids" if family.kind == "encoder-decoder" else "input_ids")
    encoder = inputs if family.kind == "encoder-decoder" else {}
    if batch == 1:
        return Text(ids, None, encoder)
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = ids[0, :PADDING] = 0
    if "input_ids" in encoder:
        encoder = {**encoder, "attention_mask": mask.clone()}
    return Text(ids, mask, encoder)


@lru_cache(maxsize=4)
def model_of(name: str, implementation: str | None = None) -> PreTrainedModel:
    """Build the model once for all tests of a family; eager for reference models."""
    changes = {} if implementation is None else {"attn_implementation": implementation}
    return FAMILIES[name].build(**changes)


@contextmanager
def prepare_model(model: PreTrainedModel, way: Way, spec: Any) -> Iterator[PreTrainedModel]:
    """Return the model, attached if requested; restore it afterwards."""
    if way == "attached":
        kvant.attach(model, spec, guard=False)
    try:
        yield model
    finally:
        if way == "attached":
            kvant.detach(model)


def make_transformers_cache(model: PreTrainedModel, family: Family) -> Cache:
    """Return the cache that transformers would use."""
    if family.kind == "encoder-decoder":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=model.config)


# ---- forwards by hand


class AttentionCounts(NamedTuple):
    """How often attention read pages, made dense rows, or used masks of transformers."""

    fused: int
    materialized: int
    masks: int

    @classmethod
    def of(cls, cache: Cache) -> AttentionCounts:
        if isinstance(cache, PairedCache):
            parts = (cache.self_attention_cache, cache.cross_attention_cache)
            return cls(*map(sum, zip(*map(cls.of, parts), strict=True)))
        stats = cache.stats() if isinstance(cache, TransformersCache) else {}
        return cls(*(stats.get(name, 0) for name in cls._fields))

    def since(self, before: AttentionCounts) -> AttentionCounts:
        return AttentionCounts(*(new - old for new, old in zip(self, before, strict=True)))


class Run(NamedTuple):
    logits: Tensor
    prompt: AttentionCounts
    decoding: AttentionCounts


@torch.no_grad()
def run_forwards(
    model: PreTrainedModel, family: Family, cache: Cache, text: Text, chunks: Sequence[int]
) -> Run:
    """Run the prompt in these chunks, then one token at a time."""
    encoded = dict(text.encoder)
    if encoded:
        encoded["encoder_outputs"] = model.get_encoder()(**text.encoder)
        encoded = {name: value for name, value in encoded.items() if not name.startswith("input")}
    cuts = [*itertools.accumulate(chunks, initial=0)]
    cuts += range(cuts[-1] + 1, text.ids.shape[1] + 1)
    logits, reads_before = [], AttentionCounts.of(cache)
    decoding = reads_before
    for start, stop in itertools.pairwise(cuts):
        decoding = AttentionCounts.of(cache) if start == sum(chunks) else decoding
        logits.append(model(**_arguments(family, cache, text, start, stop), **encoded).logits)
    whole = torch.cat(logits, 1)
    return Run(whole, decoding.since(reads_before), AttentionCounts.of(cache).since(decoding))


def _arguments(family: Family, cache: Cache, text: Text, start: int, stop: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {family.cache_argument: cache, "use_cache": True}
    mask = None if text.mask is None else text.mask[:, :stop]
    if family.kind == "encoder-decoder":
        padding = {} if mask is None else {"decoder_attention_mask": mask}
        return arguments | padding | {"decoder_input_ids": text.ids[:, start:stop]}
    arguments["input_ids"] = text.ids[:, start:stop]
    if family.kind != "recurrent":
        positions = text.real.long().cumsum(-1)[:, start:stop] - 1
        arguments["position_ids"] = positions.clamp_min(0)
    elif stop == start + 1:
        return arguments  # these need a mask for several tokens only
    return arguments if mask is None else arguments | {"attention_mask": mask}


def deviation(ours: Tensor, theirs: Tensor, text: Text) -> float:
    """Return the largest difference of logits, relative to their spread."""
    ours, theirs = ours[text.real], theirs[text.real]
    return float((ours - theirs).abs().max() / theirs.std())


# ---- a cell


class Result(NamedTuple):
    error: float
    prompt: AttentionCounts
    decoding: AttentionCounts
    calls: int  # attention calls on kvant rows, in one forward
    reasons: frozenset[str]  # reasons for dense rows


def compare_cell(cell: Cell) -> Result:
    """Compare with transformers: with dense rows if raw, else with the visible decoded rows."""
    family, text = FAMILIES[cell.family], text_of(FAMILIES[cell.family], cell.batch)
    with prepare_model(model_of(cell.family), cell.way, cell.spec) as model:
        cache = kvant.cache_for(model, cell.spec)
        stored = [record_rows(part) for part in _parts(cache)]
        ours = run_forwards(model, family, cache, text, cell.chunks)
    model = model_of(cell.family, "eager")
    oracle = (
        make_transformers_cache(model, family)
        if cell.raw
        else _oracle(model, family, cache, stored)
    )
    theirs = run_forwards(model, family, oracle, text, cell.chunks)
    error = deviation(ours.logits, theirs.logits, text)
    return Result(error, ours.prompt, ours.decoding, _calls(model, cache), _reasons(cache))


def _reasons(cache: Cache) -> frozenset[str]:
    notes = [notes for part in _parts(cache) for notes in part.context.attention_stats.values()]
    return frozenset(reason for note in notes for reason in note.materialized)


def _calls(model: PreTrainedModel, cache: Cache) -> int:
    """Count one call per layer that stores rows or reads those of another layer."""
    layers = [recipe for part in _parts(cache) for recipe in part.spec.layers]
    shared = getattr(model.config, "num_kv_shared_layers", 0)
    return sum(get_attention_spec(recipe) is not None for recipe in layers) + shared


def _parts(cache: Cache) -> list[TransformersCache]:
    if isinstance(cache, PairedCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    assert isinstance(cache, TransformersCache)
    return [cache]


def record_rows(cache: TransformersCache) -> dict[int, list[Rows]]:
    """Record the rows that each layer gets from now on."""
    rows: dict[int, list[Rows]] = defaultdict(list)
    update: Callable[..., Any] = cache.update

    def spy(keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        rows[layer].append((keys.clone(), values.clone()))
        return update(keys, values, layer, *args, **kwargs)

    cache.update = spy  # type: ignore[method-assign]
    return rows


def _oracle(
    model: PreTrainedModel, family: Family, cache: Cache, stored: list[dict[int, list[Rows]]]
) -> Cache:
    config = None if family.kind == "encoder-decoder" else model.config
    specs: list[CacheSpec] = [part.spec for part in _parts(cache)]
    parts = [Oracle(config, *pair) for pair in zip(specs, stored, strict=True)]
    if len(parts) == 1:
        return parts[0]
    parts[1].cross = True
    return EncoderDecoderCache(*parts)


# ---- the generation loop of transformers


def generate_text(
    model: PreTrainedModel,
    family: Family,
    text: Text,
    cache: Cache | None = None,
    **options: Any,
) -> Tensor:
    """Return the output of `model.generate` for a text."""
    prefix = "decoder_" if family.kind == "encoder-decoder" else ""
    arguments: dict[str, Any] = {**text.encoder, f"{prefix}input_ids": text.ids}
    if text.mask is not None:
        arguments[f"{prefix}attention_mask"] = text.mask
    if cache is not None:
        arguments[family.cache_argument] = cache
    settings = {"max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**arguments, **settings)
