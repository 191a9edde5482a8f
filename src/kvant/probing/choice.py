"""Specs in place of one that does too much, and the smallest of all that do little enough.

What costs least is tried first: scales for the channels, the first and the last rows dense, keys in
8 bits, the layers at both ends in 8 bits. It knows words of the spec language, and no model: who
judges is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvant.errors import SpecError
from kvant.planner import plan
from kvant.shapes import LayerShape
from kvant.sizes import format_size, parse_size
from kvant.spec.formats import SMOOTHED, parse_format

Judge = Callable[[str], bool]  # does the spec do little enough?

# From the smallest on; what is equally large stands with what needs no scales first.
LADDER = (
    *("turbo2", "turbo3v2", "turbo3", "turbo4v2", "turbo4v3", "turbo4", "affine4"),
    *("affine8v4", "affine6", "fp8", "affine8"),
)
CHOICES = tuple(spec for word in LADDER for spec in (word, f"{word},smooth"))
FIRST = "sinks=4"  # as many as attention is known to sink into
TAIL = 128  # the usual one


def promoted(spec: str) -> Iterator[tuple[str, str]]:
    """What to take in place of a spec, and what that changes."""
    word, *options = (part.strip() for part in spec.split(","))
    form, rest = parse_format(word), [part for part in options if part != "smooth"]
    scaled = len(rest) < len(options)
    wider = f"affine8/{form.values.word}"
    if {form.keys.family, form.values.family} & SMOOTHED:
        if not scaled:
            yield _joined(word, rest, "smooth"), "it has outliers: scale its channels"
        for other, why in _denser(rest):
            yield _joined(word, other, "smooth"), why
    if form.keys.bits < 8 and form.keys.family != "raw":
        plain = [part for part in rest if not part.startswith("group=")]
        yield _joined(wider, plain), "keys need affine8"
        yield _joined(wider, plain, "smooth"), "keys need affine8 and scaled channels"
    if not any(part.startswith("edge=") for part in rest):
        yield _joined(word, rest, "smooth", "edge=2"), "the layers at both ends need 8 bits"
    kept = [part for part in rest if part.split("=")[0] in ("window", "sinks", "capacity")]
    yield _joined("affine8", kept, "smooth"), "keys and values need 8 bits"
    yield _joined("raw", kept), "no format that was tried does little enough"


def _denser(options: list[str]) -> Iterator[tuple[list[str], str]]:
    """Options by which the first rows stay dense, or more of the last ones."""
    if not any(part.startswith(("sinks=", "capacity=")) for part in options):
        yield [*options, FIRST], "its first rows need to stay dense"
    short = [part for part in options if part.startswith("tail=") and int(part[5:]) < TAIL]
    if short:
        longer = [part for part in options if part not in short]
        yield [*longer, f"tail={TAIL}"], "its last rows need to stay dense"


def smallest(judge: Judge, layers: Sequence[LayerShape], context: int, size: str | None) -> str:
    """The first of the choices that does little enough; within a size, where one is given."""
    limit = None if size is None else parse_size(size)
    sizes = {spec: plan(layers, spec, context=context).nbytes for spec in (*CHOICES, "raw")}
    small = [spec for spec in CHOICES if sizes[spec] < sizes["raw"]]
    for spec in (one for one in small if limit is None or sizes[one] <= limit):
        if judge(spec):
            return spec
    if limit is None or sizes["raw"] <= limit:
        return "raw"
    least = format_size(min(sizes.values()))
    raise SpecError(
        f"auto:{size}: nothing that is so small at {context} tokens leaves this model what it is; "
        f"the smallest there is takes {least}: allow more bytes, or a shorter context"
    )


def _joined(word: str, options: list[str], *more: str) -> str:
    return ",".join([word, *options, *more])
