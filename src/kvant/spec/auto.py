"""Parse the spec `auto`: the smallest format that a model tolerates, found by trial.

auto := "auto" (":" SIZE)? ("," "max_kl=" NATS)? ("," "max_lost=" SHARE)?
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvant.errors import SpecError
from kvant.platform.sizes import parse_size
from kvant.spec.language import check_words

AUTO = "auto"
MAX_KL = 5e-3  # mean nats: about one percent of perplexity
MAX_LOST = 0.04  # share of the probability of an answer: formats lose about half or twice this


@dataclass(frozen=True)
class Tolerance:
    """Limits on the loss that a format may cause."""

    max_kl: float = MAX_KL  # mean nats
    max_lost: float = MAX_LOST  # share of the probability of the right answer

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_lost"):
            value = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}={value}: 0 or more is needed")


def is_auto(spec: object) -> bool:
    """Return whether a spec is `auto`, with or without limits."""
    return isinstance(spec, str) and _split_options(spec)[0].partition(":")[0].strip() == AUTO


def parse_auto_size(spec: str) -> str | None:
    """Return the size limit of `auto:SIZE`, None without one."""
    _, colon, size = _split_options(spec)[0].partition(":")
    if colon and not size:
        raise SpecError(f"{spec!r}: a size is needed after the colon; nearest: auto:1GiB")
    if not colon:
        return None
    parse_size(size)
    return size


def parse_auto_tolerance(spec: str, default: Tolerance) -> Tolerance:
    """Return the limits of `auto,max_kl=NATS,max_lost=SHARE`, from `default` if absent."""
    limits: dict[str, float] = {}
    for part in _split_options(spec)[1:]:
        name, _, number = part.partition("=")
        if name not in ("max_kl", "max_lost") or name in limits:
            raise SpecError(f"{spec!r}: auto takes max_kl=NATS and max_lost=SHARE, each once")
        try:
            limits[name] = float(number)
        except ValueError:
            raise SpecError(f"{spec!r}: {name} needs a number; nearest: {name}=0.01") from None
    return replace(default, **limits)


def check_spec_or_auto(spec: str) -> None:
    """Refuse an invalid spec or `auto`, without building codecs or importing torch."""
    if is_auto(spec):
        parse_auto_size(spec)
        parse_auto_tolerance(spec, Tolerance())
    else:
        check_words(spec)


def _split_options(spec: str) -> list[str]:
    return [part.strip() for part in spec.split(",")]
