"""Caches of transformers that quantize, measured as ours are: divergence, bytes, and time a token.

They read a prompt dense and all of it opened at once afterwards, so tokens are fed one by one: what
decoding sees. A text of 1,024 tokens twice is enough for that, and ours are measured on it again.
What is opened and quantized anew is their own affair; so are scales in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from transformers import QuantizedCache

from kvant.bench.candidates import Make, Remembered, dynamic, ours
from kvant.bench.speed import latencies
from kvant.checkpoints import load
from kvant.eval.evaluation import cut
from kvant.eval.result import quality
from kvant.probing import divergence
from kvant.probing.predictions import damage_by

PIECES, CONTEXT, SEED = 2, 1024, 0
AT, REPEATS = 1536, 31  # tokens that are there when one more is timed
HOST = "transformers"  # its own cache, which quantizes nothing
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "quanto, 4 bits": ("quanto", {"nbits": 4}),
    "quanto, 2 bits": ("quanto", {"nbits": 2}),
    "hqq, 8 bits": ("hqq", {"nbits": 8, "axis_key": 1, "axis_value": 1}),
    "hqq, 4 bits": ("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}),
    "fp8 of transformers": ("fp8", {}),
}
OURS = (
    *("affine8", "fp8", "affine4,group=64,tail=0", "turbo4v4,tail=0"),
    *("affine4,group=64", "affine4", "affine4,smooth", "turbo4v4"),
    *("affine2,group=64,tail=0", "turbo2,tail=0", "turbo2"),
)
FORMATS = (*THEIRS, *OURS)


class Absent(Exception):
    """Why one is left out."""


def maker(model: Any, name: str) -> Callable[[], Any]:
    backend, options = THEIRS[name]
    if backend in ("quanto", "hqq") and not find_spec("optimum" if backend == "quanto" else "hqq"):
        raise Absent(f"{name}: pip install kvant[peers]")
    return lambda: QuantizedCache(backend, model.config, **options)


def figures(model: Any, pieces: tuple[Tensor, ...], name: str) -> dict[str, Any]:
    some = [piece[:, :CONTEXT] for piece in pieces[:PIECES]]
    if name in THEIRS:
        return quality(damage_by(model, some, maker(model, name), chunk=1), SEED)
    return quality(divergence(model, some, name), SEED)


def steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Milliseconds for one more token and bytes of the cache, all in turn, in bf16."""
    model, _ = load(None, device="cpu")
    makes: dict[str, Make] = {HOST: dynamic(model)}
    for name in THEIRS:
        try:
            makes[name] = _remembered(model, maker(model, name))
        except Absent as error:
            print(f"skipped: {error}")
    makes |= ours(model, ("raw", *OURS))
    held: dict[str, Any] = {}
    kept = {name: _kept(held, name, make) for name, make in makes.items()}
    text = cut(tokenizer, None, AT, AT).pieces[0][0].tolist()
    found = latencies(kept, text, [AT], REPEATS)
    return [row | {"nbytes": held[row["cache"]].nbytes} for row in found]


def _remembered(model: Any, make: Callable[[], Any]) -> Make:
    return lambda: Remembered(model, make(), _nbytes)


def _kept(held: dict[str, Any], name: str, make: Make) -> Make:
    def made() -> Any:
        held[name] = make()
        return held[name]

    return made


def _nbytes(cache: Any) -> int:
    """Every tensor that the layers hold, inside of tuples, dicts and tensor subclasses too."""
    return sum(_size(value) for layer in cache.layers for value in vars(layer).values())


def _size(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    if not isinstance(value, Tensor):
        return 0
    parts = getattr(value, "__tensor_flatten__", None)
    return value.nbytes if parts is None else sum(_size(getattr(value, n)) for n in parts()[0])
