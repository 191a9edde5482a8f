"""Compare the Triton kernels with the reference backend, format by format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvant.attention import attend
from kvant.attention.triton.arguments import explain_unsupported_codec
from kvant.bench.attend import make_cache
from kvant.bench.harness import BenchDevice
from kvant.cache import Cache
from kvant.contracts import Codec
from kvant.errors import UnsupportedView
from kvant.spec import parse
from kvant.spec.formats import FORMAT_WORDS

# Percent of the norm: more than what rounding to bfloat16 leaves, less than what one lost row does.
MAX_ERROR = 1.0
STARTS = [0, 37]  # padding of the two sequences
QUERY_COUNTS = 1, 5  # newest tokens that attend together
RIGHT, WRONG, REFUSED = "right", "wrong", "not read"
BITS = {word.word: word.bits for word in FORMAT_WORDS}


def get_codecs(name: str) -> tuple[Codec, ...]:
    """Return the codecs of the keys and the values of a format."""
    return tuple(parse(name, 1).layers[0].sides.values())  # type: ignore[union-attr]


def list_formats() -> list[str]:
    """Return the formats, most bytes first, without other names for the same codecs."""
    unique: dict[tuple[Codec, ...], str] = {}
    for name in sorted(BITS, key=BITS.__getitem__, reverse=True):
        unique.setdefault(get_codecs(name), name)
    return list(unique.values())


FORMATS = list_formats()


def is_supported(name: str) -> bool:
    """Whether the kernels are written for the codecs of this format."""
    return all(explain_unsupported_codec(codec) is None for codec in get_codecs(name))


def check_format(
    name: str, backend: str, device: BenchDevice, shape: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Compare a backend with the reference; `shape` has key heads, query group, rows, channels.

    Errors are in percent of the norm: that of attention over the same pages, and that of the rows
    in the pages, compared with those that a CPU stores.
    """
    heads, group, count, dim = shape
    torch.manual_seed(0)
    rows = torch.randn(2, len(STARTS), heads, count, dim).bfloat16()
    queries = torch.randn(len(STARTS), heads * group, max(QUERY_COUNTS), dim).bfloat16()
    spec = f"{name},tail=3,prefill=stored"  # most pages are sealed
    cache = make_cache(spec, [backend])
    row = {"format": name, "bits": BITS[name], "error_percent": None, "stored_percent": None}
    try:
        error = _measure_errors(cache, rows.to(device.name), queries.to(device.name), backend)
    except UnsupportedView as refusal:
        return row | {"verdict": REFUSED, "reason": str(refusal).partition(": ")[2]}
    other = Cache(1, spec)
    for columns in _split_columns(count):
        _append(other, rows[:, :, :, columns])
    pairs = zip(cache[0].read(), other[0].read(), strict=True)
    stored = max(measure_distance(ours.cpu(), theirs) for ours, theirs in pairs)
    row |= {"error_percent": error, "stored_percent": stored}
    verdict = RIGHT if error <= MAX_ERROR and stored <= MAX_ERROR else WRONG  # wrong for NaN
    return row | {"verdict": verdict, "reason": None}


def _measure_errors(cache: Cache, rows: Tensor, queries: Tensor, backend: str) -> float:
    """Append the rows; return the largest error of the newest queries of each append."""
    errors = []
    for columns in _split_columns(rows.shape[3]):
        view = _append(cache, rows[:, :, :, columns])
        if (num_new := columns.stop - columns.start) in QUERY_COUNTS:
            q = queries[:, :, :num_new]
            ours = attend(q, view, backend=backend)
            errors.append(measure_distance(ours, attend(q.double(), view, backend="reference")))
    return max(errors)


def _split_columns(count: int) -> list[slice]:
    """Return the columns of each append: a prompt, then as many as queries."""
    stops = [count - sum(QUERY_COUNTS)]
    for num_new in QUERY_COUNTS:
        stops.append(stops[-1] + num_new)
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def _append(cache: Cache, rows: Tensor) -> Any:
    state: Any = cache[0]
    return state.append(*rows, start=None if cache.batch else STARTS)


def measure_distance(x: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference in percent of that of the reference."""
    return 100 * float((x.double() - reference.double()).norm() / reference.double().norm())
