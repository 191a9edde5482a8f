"""The words of a spec after the first, and which of them contradict each other.

    option := NAME | NAME "=" VALUE

OPTIONS gives each name the function that reads its value. Numbers are decimal and end at
MAX_NUMBER. An option that no format of the spec can follow is an error; one that merely changes
nothing (a tail of raw rows, more sinks than window) is not. Knows words and numbers, no recipes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from kvant.contracts import PageSelection, Pruning
from kvant.errors import SpecError
from kvant.scores import SCORES
from kvant.spec.formats import (
    ROTATABLE_FAMILIES,
    SMOOTHABLE_FAMILIES,
    LayerFormat,
    SideFormat,
    find_nearest,
    parse_format,
    refuse_without_model,
)

MAX_OPTION_VALUE = 2**31 - 1
NUMBER_SUFFIXES = {
    "": 1,
    "k": 1 << 10,
    "m": 1 << 20,
}  # that a number may be meant in: 4k tokens are 4096
ADAPTIVE = "adaptive"
NUM_UNSELECTED_LAYERS = 2  # layers, the first ones, of which no pages are selected unless asked for


@dataclass(frozen=True)
class NumberOption:
    """A whole number from `least` on, a multiple of `multiple`, or one of `among`."""

    minimum: int = 0
    multiple: int = 1
    choices: tuple[int, ...] = ()

    def __call__(self, name: str, text: str | None) -> int:
        digits = re.search("([0-9]{1,10})([kKmM]?)", text or "")
        read = (
            int(digits[1]) * NUMBER_SUFFIXES[digits[2].lower()] if digits else max(1, self.minimum)
        )
        near = self.find_nearest(read)
        if text is None or not digits or digits[1] != text or near != read:
            got = name if text is None else f"{name}={text}"
            raise SpecError(f"option {short(got)}: allowed is {self}; nearest: {name}={near}")
        return read

    def find_nearest(self, number: int) -> int:
        if self.choices:
            return min(self.choices, key=lambda value: abs(value - number))
        whole = max(1, round(number / self.multiple)) * self.multiple if number else 0
        return min(max(whole, self.minimum), MAX_OPTION_VALUE // self.multiple * self.multiple)

    def __str__(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        of = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"a whole number from {self.minimum} to {MAX_OPTION_VALUE}{of}"


def parse_flag(name: str, text: str | None) -> bool:
    if text is not None:
        raise SpecError(f"option {short(f'{name}={text}')}: {name} takes no value; nearest: {name}")
    return True


def parse_prefill(name: str, text: str | None) -> str:
    if text not in ("dense", "stored"):
        got = name if text is None else f"{name}={text}"
        near = find_nearest(text or "dense", ("dense", "stored"))
        raise SpecError(f"option {short(got)}: allowed is dense or stored; nearest: {name}={near}")
    return text


def parse_edge(name: str, text: str | None) -> tuple[int, LayerFormat]:
    """How many layers at each end, and their format."""
    number, colon, word = (text or "").partition(":")
    count = NumberOption()(name, number if text else None)
    return count, parse_format(word if colon else "affine8")


def parse_select(name: str, text: str | None) -> tuple[PageSelection, int]:
    """How many of the sealed pages a token reads, and the first layer that selects."""
    number, colon, first = (text or "").partition(":")
    digits, percent = re.match("[0-9]{0,10}", number), number.endswith("%")
    read = int(digits[0]) if digits and digits[0] else 0
    near = f"{min(max(1, read), 100)}%" if percent else f"{min(max(1, read), MAX_OPTION_VALUE)}"
    if near != number:
        got = name if text is None else f"{name}={text}"
        raise SpecError(
            f"option {short(got)}: allowed is a number of pages, or a share of them from 1% to"
            f" 100%; nearest: {name}={near}"
        )
    selection = PageSelection(percent=float(read)) if percent else PageSelection(pages=read)
    if colon and not re.fullmatch("[0-9]{1,9}", first):
        raise SpecError(
            f"option {short(f'{name}={text}')}: behind the colon stands the first layer that"
            f" selects; nearest: {name}={number}:{NUM_UNSELECTED_LAYERS}"
        )
    return selection, int(first) if colon else NUM_UNSELECTED_LAYERS


def parse_prune(name: str, text: str | None) -> Pruning:
    """By which score rows go behind a prompt, how many stay, and whether heads share these."""
    word, _, rest = (text or "").partition(":")
    keep, shared, adaptive = rest.partition(":")
    got = short(name if text is None else f"{name}={text}")
    if word not in SCORES:
        near = f"{name}={find_nearest(word or 'snapkv', SCORES)}:{keep or '25%'}"
        raise SpecError(
            f"option {got}: allowed is a score, {', '.join(SCORES)}, and behind a colon how many"
            f" rows stay; nearest: {near}"
        )
    digits, percent = re.match("[0-9]{0,10}", keep), keep.endswith("%")
    read = int(digits[0]) if digits and digits[0] else 0
    near = f"{min(max(1, read), 100)}%" if percent else f"{min(max(1, read), MAX_OPTION_VALUE)}"
    if near != keep or (shared and adaptive != ADAPTIVE):
        near += f":{ADAPTIVE}" if shared else ""
        raise SpecError(
            f"option {got}: allowed is a number of rows that a head keeps, or a share of the tokens"
            f" from 1% to 100%, and then :{ADAPTIVE} where heads share it;"
            f" nearest: {name}={word}:{near if keep else '25%'}"
        )
    kept = {"percent": float(read)} if percent else {"rows": read}
    return Pruning(SCORES[word](), adaptive=bool(shared), **kept)


OPTION_PARSERS: dict[str, Callable[[str, str | None], Any]] = {
    "group": NumberOption(choices=(16, 32, 64, 128)),
    "rotate": parse_flag,
    "smooth": parse_flag,
    "window": NumberOption(1),
    "sinks": NumberOption(),
    "tail": NumberOption(),
    "start": NumberOption(),
    "page": NumberOption(64, multiple=64),
    "slack": NumberOption(),
    "prefill": parse_prefill,
    "step": NumberOption(1),
    "capacity": NumberOption(1),
    "edge": parse_edge,
    "seed": NumberOption(),
    "select": parse_select,
    "prune": parse_prune,
}


def parse_option(word: str) -> tuple[str, Any]:
    """The name of an option and its value."""
    name, equals, value = word.partition("=")
    if name in OPTION_PARSERS:
        return name, OPTION_PARSERS[name](name, value if equals else None)
    refuse_without_model(name)
    near = find_nearest(name.strip(), OPTION_PARSERS)
    if near not in ("rotate", "smooth"):
        near += f"={short(value.strip())[1:-1] or 'N'}"
    raise SpecError(
        f"option {short(word)} is not known; allowed: {', '.join(OPTION_PARSERS)};"
        f" nearest: {near if word else 'no comma there'}"
    )


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Name to value, in the order of `words`."""
    options: dict[str, Any] = {}
    for word in words:
        name, value = parse_option(word)
        if name in options:
            raise SpecError(
                f"option {short(word)} comes after another {name}; allowed: each option once;"
                f" nearest: {word} alone"
            )
        options[name] = value
    return options


def check_options(options: Mapping[str, Any], formats: Iterable[LayerFormat]) -> None:
    """An option that no side of any format can follow was meant for another spec."""
    formats = tuple(formats)
    sides = [side for form in formats for side in (form.keys, form.values)]
    words = "/".join(dict.fromkeys(side.word for side in sides))
    families = {side.family for side in sides}
    if "group" in options:
        check_group(options["group"], sides)
    if "rotate" in options and not families & ROTATABLE_FAMILIES:
        why = "is rotated already" if "turbo" in families else "has nothing to rotate"
        raise SpecError(
            f"option 'rotate': {words} {why}; allowed with affine formats and fp8;"
            f" nearest: {words if 'turbo' in families else 'affine8,rotate'}"
        )
    if "smooth" in options and not families & SMOOTHABLE_FAMILIES:
        raise SpecError(
            f"option 'smooth': {words} has nothing to smooth; allowed with affine, turbo and fp8;"
            " nearest: affine8,smooth"
        )
    for name in ("window", "sinks"):
        if "prune" in options and name in options:
            raise SpecError(
                f"option '{name}={options[name]}' beside prune: rows go by age, or by what they"
                " matter; allowed: one of the two; nearest: no " + name
            )
    if "seed" in options and "rotate" not in options and "turbo" not in families:
        raise SpecError(
            f"option 'seed={options['seed']}': {words} has no rotation to seed; allowed with turbo"
            " formats and with rotate; nearest: no seed"
        )


def check_group(group: int, sides: Iterable[SideFormat]) -> None:
    grouped = [side for side in sides if side.family == "affine"]
    if not grouped:
        raise SpecError(
            f"option 'group={group}': this format has no groups; allowed with affine formats;"
            f" nearest: affine8,group={group}"
        )
    for side in grouped:
        if side.group not in (None, group):
            raise SpecError(
                f"option 'group={group}': {side.word} means group {side.group}; allowed with affine"
                f" formats; nearest: affine{side.bits},group={group}"
            )


def check_capacity(options: Mapping[str, Any]) -> None:
    capacity = options.get("capacity", MAX_OPTION_VALUE)
    for name in ("window", "sinks"):
        if options.get(name, 0) > capacity:
            raise SpecError(
                f"option '{name}={options[name]}' with capacity={capacity} can never be filled;"
                f" allowed: at most the capacity; nearest: {name}={capacity}"
            )
