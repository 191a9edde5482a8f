"""The words of `auto`: the smallest format that a model tolerates, found by trying them on it.

auto := "auto" (":" SIZE)? ("," "max_kl=" NATS)? ("," "max_lost=" SHARE)?
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.errors import SpecError
from kvant.sizes import parse_size
from kvant.spec.language import check_words

AUTO = "auto"
MAX_KL = 5e-3  # nats, in the mean: about one percent of perplexity
MAX_LOST = 0.04  # of the chance of an answer: between formats that are twice that and half of it


@dataclass(frozen=True)
class Tolerance:
    """What a format may do to a model."""

    max_kl: float = MAX_KL  # nats, in the mean
    max_lost: float = MAX_LOST  # of the chance that an answer is right

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_lost"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}={value}: 0 or more is needed")


def is_auto(spec: object) -> bool:
    return isinstance(spec, str) and _split_options(spec)[0].partition(":")[0].strip() == AUTO


def parse_auto_size(spec: str) -> str | None:
    """What `auto:SIZE` may take, if it says so."""
    _, colon, size = _split_options(spec)[0].partition(":")
    if colon and not size:
        raise SpecError(f"{spec!r}: a size is needed behind the colon; nearest: auto:1GiB")
    if not colon:
        return None
    parse_size(size)
    return size


def parse_auto_tolerance(spec: str, default: Tolerance) -> Tolerance:
    """What `auto,max_kl=NATS,max_lost=SHARE` may do to a model, where it says so."""
    told: dict[str, float] = {}
    for part in _split_options(spec)[1:]:
        name, _, number = part.partition("=")
        if name not in ("max_kl", "max_lost") or name in told:
            raise SpecError(f"{spec!r}: auto takes max_kl=NATS and max_lost=SHARE, each once")
        try:
            told[name] = float(number)
        except ValueError:
            raise SpecError(f"{spec!r}: {name} needs a number; nearest: {name}=0.01") from None
    return replace(default, **told)


def check_spec_or_auto(spec: str) -> None:
    """Refuse a spec with a wrong word, `auto` included. It builds no codec and needs no torch."""
    if is_auto(spec):
        parse_auto_size(spec)
        parse_auto_tolerance(spec, Tolerance())
    else:
        check_words(spec)


def _split_options(spec: str) -> list[str]:
    return [part.strip() for part in spec.split(",")]
