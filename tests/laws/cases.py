"""The product of features that every law covers, in full or pairwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from cache.tagged import LayerCache
from cache.tiled import Tiled
from kvant.attention import BACKENDS as READERS
from kvant.contracts import View
from kvant.recipes import LayerSpec, Prefill
from kvant.spec import parse
from thin import thin_rows

WIDTHS = (8, 6, 5, 4, 3, 2)
AFFINE = [f"affine{bits}" for bits in WIDTHS]
FOREIGN = "rowsteps"  # registered from outside, by the fixture `foreign_codec`
FORMATS = ("raw", *AFFINE, "affine4,rotate", "fp8", "turbo4", "turbo3", "turbo2", FOREIGN)
RETENTIONS = (
    "",
    "sinks=3",
    "window=70,sinks=4",
    "window=200,sinks=0",
    "prune=random:100%:adaptive",
)
ARENAS = ("step=1", "step=256,tail=0", "capacity=640", "tail=9,step=64")
BATCHES = (1, 3, "padded")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Error bound of backends that multiply codes directly; levels and queries have 16 bits: the worst
# of the full product is 7.1e-3 (turbo3 with affine4, float16).
COARSE = 8e-3
DEVICE = torch.device("cpu")
HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 2, 32, 48


@dataclass(frozen=True)
class Case:
    keys: str
    values: str
    retention: str
    arena: str
    batch: int | str
    dtype: torch.dtype

    def __str__(self) -> str:
        parts = (*astuple(self)[:-1], str(self.dtype).removeprefix("torch."))
        return "-".join(str(part).replace(",", "+") or "all" for part in parts)

    @property
    def spec(self) -> LayerSpec:
        """Parse keys and values separately, since either may be rotated."""
        layers = []
        for text in (self.keys, self.values):
            options = ",".join(o for o in (text, self.retention, self.arena) if o)
            layers.append(parse(options, 1).layers[0])
        keys, values = layers
        assert isinstance(keys, LayerSpec) and isinstance(values, LayerSpec)
        merged = {f.name: getattr(keys, f.name) for f in fields(keys)}
        return LayerSpec(**merged | {"values": values.values})

    @property
    def start(self) -> list[int] | None:
        return [0, 5, 67] if self.batch == "padded" else None

    @property
    def sequences(self) -> int:
        return 1 if self.batch == 1 else 3

    def tolerance(self, backend: str) -> float:
        """Return the tolerance against float64: rounding of the output to the rows' dtype."""
        rounding = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[self.dtype]
        exact = backend != "native" or (self.keys, self.values) == ("raw", "raw")
        return rounding if exact else max(rounding, COARSE)

    def state(self) -> LayerCache:
        tiled = self.arena.startswith("tail=9")
        return LayerCache(self.spec, Tiled() if tiled else None)

    def rows(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        """Return rows that depend on the seed only: row t is the same for any total."""
        sides = []
        for side, dim in enumerate((KEY_DIM, VALUE_DIM)):
            generator = torch.Generator().manual_seed(1000 * seed + side)
            rows = torch.randn(count, self.sequences, HEADS, dim, generator=generator)
            sides.append(rows.permute(1, 2, 0, 3).to(DEVICE, self.dtype))
        return sides[0], sides[1]

    def queries(self, seed: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(7000 + seed)
        shape = (count, self.sequences, HEADS * GROUP, KEY_DIM)
        queries = torch.randn(shape, generator=generator).permute(1, 2, 0, 3)
        return queries.to(DEVICE, self.dtype)


def make_layer_of(
    case: Case, *chunks: int, seed: int = 0, prefill: Prefill = "stored"
) -> LayerCache:
    """Return a layer with the rows of `seed` in chunks of these sizes."""
    state = case.state()
    keys, values = case.rows(seed, sum(chunks))
    place = 0
    for count in chunks:
        append_chunk(
            case, state, keys[:, :, place : place + count], values[:, :, place : place + count]
        )
        place += count
    return state


def append_chunk(case: Case, state: LayerCache, keys: Tensor, values: Tensor) -> None:
    start = None if state.length else case.start
    state.append(keys, values, start=start, prefill="stored")


def list_readers(view: View) -> list[str]:
    """Return the backends that read a view, the preferred one first; slow ones have separate
    laws.
    """
    names = [backend.name for backend in READERS if backend.supports(view) is None]
    return [name for name in names if name != "interpreted"]


def backend_tolerance(view: View) -> float:
    """Return the error bound of the preferred backend against float64 over float32 rows."""
    exact = view.keys.codec.exact and view.values.codec.exact
    return 1e-5 if exact or list_readers(view)[0] == "reference" else COARSE


def iterate_cases() -> Iterator[Case]:
    axes = (FORMATS, FORMATS, RETENTIONS, ARENAS, BATCHES, DTYPES)
    return (Case(*values) for values in itertools.product(*axes))


def pairwise() -> list[Case]:
    """Return few cases that cover every pair of values of different axes; greedy."""
    axes = (FORMATS, FORMATS, RETENTIONS, ARENAS, BATCHES, DTYPES)
    places = list(itertools.combinations(range(len(axes)), 2))
    missing = {(i, j, a, b) for i, j in places for a in axes[i] for b in axes[j]}
    cases = []
    while missing:
        i, j, a, b = min(missing, key=str)
        chosen: dict[int, object] = {i: a, j: b}
        for axis in (n for n in range(len(axes)) if n not in (i, j)):
            chosen[axis] = max(axes[axis], key=lambda value: _gain(missing, chosen, axis, value))
        case = tuple(chosen[n] for n in range(len(axes)))
        missing -= {(i, j, case[i], case[j]) for i, j in places}
        cases.append(Case(*case))  # type: ignore[arg-type]
    return cases


def thin_cases(laws: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return a subset in which each law covers every value of every axis, and each case has a
    law.
    """
    return thin_rows(
        itertools.product(laws, cases),
        lambda row: (row[1], *((row[0], value) for value in astuple(_case(row[1])))),
    )


def _case(row: Case | tuple[Case, int]) -> Case:
    return row if isinstance(row, Case) else row[0]


def _gain(missing: set[tuple], chosen: dict[int, object], axis: int, value: object) -> int:
    pairs = [(min(o, axis), max(o, axis), o) for o in chosen]
    return sum(
        (i, j, chosen[o] if o < axis else value, value if o < axis else chosen[o]) in missing
        for i, j, o in pairs
    )
