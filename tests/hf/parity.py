"""A family driven through a text, with a cache of ours and with the host's own: the two must agree.

What is compared is one cell: a family, a format, a batch, a way to take in the prompt, and a way to
hand the cache to the model. Logits are those of every token but padding.
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
from hf.oracle import Oracle, Rows, attention_of
from hf.zoo import FAMILIES, NAMES, Family
from kvant.hf import PairedCache, TransformersCache
from kvant.recipes import CacheSpec, LayerSpec

Batch = Literal[1, 2]  # two: the first of the sequences is left-padded
Prefill = Literal["one-shot", "chunked"]
Way = Literal["stock", "attached"]  # a model as it comes, or after kvant.attach

FORMATS = ("raw", "affine8", "affine4", "turbo4v4")
BATCHES: tuple[Batch, ...] = (1, 2)
PAGE = 8  # small, so that a short text has several
PADDING = 7
TOLERANCE = 1e-4  # of logits, relative to how far they spread
PROMPT, TOKENS = 24, 44
# A page that falls due inside a chunk would give its queries different seams, which no dense rows
# of one forward can show: compressed chunks end where pages do.
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
        return "raw" if self.raw else small_pages(self.format)

    def refusal(self) -> str | None:
        """Why no cache can serve it: the model's own forward fails."""
        alike = self.batch == 2 and self.prefill == "chunked"
        if alike and self.family in ("mamba", "falcon_mamba"):
            return "the model lays the mask of all tokens over the states of a chunk"
        return None


def small_pages(spec: str, **changes: Any) -> LayerSpec:
    """The spec with pages that a short text fills, sealed as soon as they are full."""
    layer = kvant.parse(spec, 1).layers[0]
    assert isinstance(layer, LayerSpec)
    return replace(layer, **{"page": PAGE, "tail": 0, **changes})


def every_cell() -> Iterator[Cell]:
    """The whole matrix."""
    axes = (NAMES, FORMATS, BATCHES, ("one-shot", "chunked"), ("stock", "attached"))
    cells = (Cell(*values) for values in itertools.product(*axes))
    return (cell for cell in cells if cell.refusal() is None)


def pairwise() -> list[Cell]:
    """Few cells of each family in which every two values of other axes meet; greedy.

    Families begin at different cells, so three values that no family combines meet in another.
    """
    chosen = []
    for number, name in enumerate(NAMES):
        cells = [cell for cell in every_cell() if cell.family == name]
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


# ---- what a model is given


@dataclass(frozen=True, eq=False)
class Text:
    """What a model reads: tokens of its decoder, and what is before them."""

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
    """Built once for the tests of a family; eager for what others are compared with."""
    changes = {} if implementation is None else {"attn_implementation": implementation}
    return FAMILIES[name].build(**changes)


@contextmanager
def handed(model: PreTrainedModel, way: Way, spec: Any) -> Iterator[PreTrainedModel]:
    """The model, attached if that is the way; as it was afterwards."""
    if way == "attached":
        kvant.attach(model, spec, guard=False)
    try:
        yield model
    finally:
        if way == "attached":
            kvant.detach(model)


def host_cache(model: PreTrainedModel, family: Family) -> Cache:
    """What the host itself would use."""
    if family.kind == "encoder-decoder":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=model.config)


# ---- forwards by hand


class Reads(NamedTuple):
    """How often attention read pages, how often dense rows were made, masks of the host's."""

    fused: int
    materialized: int
    masks: int

    @classmethod
    def of(cls, cache: Cache) -> Reads:
        if isinstance(cache, PairedCache):
            parts = (cache.self_attention_cache, cache.cross_attention_cache)
            return cls(*map(sum, zip(*map(cls.of, parts), strict=True)))
        stats = cache.stats() if isinstance(cache, TransformersCache) else {}
        return cls(*(stats.get(name, 0) for name in cls._fields))

    def since(self, before: Reads) -> Reads:
        return Reads(*(new - old for new, old in zip(self, before, strict=True)))


class Run(NamedTuple):
    logits: Tensor
    prompt: Reads
    decoding: Reads


@torch.no_grad()
def drive(
    model: PreTrainedModel, family: Family, cache: Cache, text: Text, chunks: Sequence[int]
) -> Run:
    """The prompt in these chunks, then one token after the other."""
    encoded = dict(text.encoder)
    if encoded:
        encoded["encoder_outputs"] = model.get_encoder()(**text.encoder)
        encoded = {name: given for name, given in encoded.items() if not name.startswith("input")}
    cuts = [*itertools.accumulate(chunks, initial=0)]
    cuts += range(cuts[-1] + 1, text.ids.shape[1] + 1)
    logits, begun = [], Reads.of(cache)
    decoding = begun
    for start, stop in itertools.pairwise(cuts):
        decoding = Reads.of(cache) if start == sum(chunks) else decoding
        logits.append(model(**_arguments(family, cache, text, start, stop), **encoded).logits)
    whole = torch.cat(logits, 1)
    return Run(whole, decoding.since(begun), Reads.of(cache).since(decoding))


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
        return arguments  # these take a mask for more than one token only
    return arguments if mask is None else arguments | {"attention_mask": mask}


def deviation(ours: Tensor, theirs: Tensor, text: Text) -> float:
    """The largest difference of logits, relative to how far logits spread."""
    ours, theirs = ours[text.real], theirs[text.real]
    return float((ours - theirs).abs().max() / theirs.std())


# ---- a cell


class Result(NamedTuple):
    error: float
    prompt: Reads
    decoding: Reads
    calls: int  # of attention on rows of ours, in one forward
    reasons: frozenset[str]  # what dense rows were made for


def compared(cell: Cell) -> Result:
    """Ours against the host's: with dense rows if raw, and with the rows that a query sees."""
    family, text = FAMILIES[cell.family], text_of(FAMILIES[cell.family], cell.batch)
    with handed(model_of(cell.family), cell.way, cell.spec) as model:
        cache = kvant.cache_for(model, cell.spec)
        stored = [recorded(part) for part in _parts(cache)]
        ours = drive(model, family, cache, text, cell.chunks)
    model = model_of(cell.family, "eager")
    oracle = host_cache(model, family) if cell.raw else _oracle(model, family, cache, stored)
    theirs = drive(model, family, oracle, text, cell.chunks)
    error = deviation(ours.logits, theirs.logits, text)
    return Result(error, ours.prompt, ours.decoding, _calls(model, cache), _reasons(cache))


def _reasons(cache: Cache) -> frozenset[str]:
    notes = [notes for part in _parts(cache) for notes in part.context.attention_stats.values()]
    return frozenset(reason for one in notes for reason in one.materialized)


def _calls(model: PreTrainedModel, cache: Cache) -> int:
    """One for each layer that stores rows, and for each that reads those of another."""
    layers = [recipe for part in _parts(cache) for recipe in part.spec.layers]
    shared = getattr(model.config, "num_kv_shared_layers", 0)
    return sum(attention_of(recipe) is not None for recipe in layers) + shared


def _parts(cache: Cache) -> list[TransformersCache]:
    if isinstance(cache, PairedCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    assert isinstance(cache, TransformersCache)
    return [cache]


def recorded(cache: TransformersCache) -> dict[int, list[Rows]]:
    """The rows that each layer is given from now on."""
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
    parts = [Oracle(config, *both) for both in zip(specs, stored, strict=True)]
    if len(parts) == 1:
        return parts[0]
    parts[1].cross = True
    return EncoderDecoderCache(*parts)


# ---- the host's own loop


def generated(
    model: PreTrainedModel,
    family: Family,
    text: Text,
    cache: Cache | None = None,
    **options: Any,
) -> Tensor:
    """What `model.generate` makes of a text."""
    prefix = "decoder_" if family.kind == "encoder-decoder" else ""
    arguments: dict[str, Any] = {**text.encoder, f"{prefix}input_ids": text.ids}
    if text.mask is not None:
        arguments[f"{prefix}attention_mask"] = text.mask
    if cache is not None:
        arguments[family.cache_argument] = cache
    settings = {"max_new_tokens": 12, "do_sample": False, **options}
    return model.generate(**arguments, **settings)
