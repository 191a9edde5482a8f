"""Parse the options of a spec, and refuse those that contradict each other.

    option := NAME | NAME "=" VALUE
    layers := "layers=" run ("+" run)*          run := FIRST ("-" LAST)? ":" FORMAT

OPTION_PARSERS maps each name to the parser of its value. Numbers are decimal, at most
MAX_OPTION_VALUE. An option that no format of the spec supports is an error; an option without
effect (a tail of raw rows, more sinks than window) is not. This module knows words and numbers, but
no recipes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, NamedTuple

from kvant.contracts import PageSelection
from kvant.errors import SpecError
from kvant.retention import DEFAULT_WINDOW_SINKS, RETENTIONS, Pruning, Retention
from kvant.spec.formats import (
    MAX_LAYERS,
    ROTATABLE_FAMILIES,
    SMOOTHABLE_FAMILIES,
    LayerFormat,
    find_nearest,
    parse_format,
    refuse_auto,
    split_table,
)
from kvant.spec.tables import RETENTION_TABLE, SCORE_TABLE

MAX_OPTION_VALUE = 2**31 - 1
NUMBER_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20}  # for suggestions: 4k may mean 4096
ADAPTIVE = "adaptive"
NUM_UNSELECTED_LAYERS = 2  # the first layers read all pages unless select=N:LAYER says otherwise


@dataclass(frozen=True)
class NumberOption:
    """A whole number, at least `minimum` and a multiple of `multiple`, or one of `choices`."""

    minimum: int = 0
    multiple: int = 1
    choices: tuple[int, ...] = ()

    def __call__(self, name: str, text: str | None) -> int:
        digits = re.search("([0-9]{1,10})([kKmM]?)", text or "")
        number = (
            int(digits[1]) * NUMBER_SUFFIXES[digits[2].lower()] if digits else max(1, self.minimum)
        )
        nearest = self.find_nearest(number)
        if text is None or not digits or digits[1] != text or nearest != number:
            option = _format_option(name, text)
            raise SpecError(f"option {option}: allowed is {self}; nearest: {name}={nearest}")
        return number

    def find_nearest(self, number: int) -> int:
        """Return the allowed number nearest to `number`."""
        if self.choices:
            return min(self.choices, key=lambda value: abs(value - number))
        rounded = max(1, round(number / self.multiple)) * self.multiple if number else 0
        return min(max(rounded, self.minimum), MAX_OPTION_VALUE // self.multiple * self.multiple)

    def __str__(self) -> str:
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        suffix = f", a multiple of {self.multiple}" if self.multiple > 1 else ""
        return f"a whole number from {self.minimum} to {MAX_OPTION_VALUE}{suffix}"


def _format_option(name: str, text: str | None) -> str:
    """Quote an option for a message, shortened."""
    return short(name if text is None else f"{name}={text}")


def parse_flag(name: str, text: str | None) -> bool:
    if text is not None:
        raise SpecError(
            f"option {_format_option(name, text)}: {name} takes no value; nearest: {name}"
        )
    return True


def parse_prefill(name: str, text: str | None) -> str:
    if text not in ("dense", "stored"):
        nearest = find_nearest(text or "dense", ("dense", "stored"))
        option = _format_option(name, text)
        raise SpecError(f"option {option}: allowed is dense or stored; nearest: {name}={nearest}")
    return text


def parse_edge(name: str, text: str | None) -> tuple[int, LayerFormat]:
    """Parse the number of layers at each end, and their format."""
    number, colon, word = (text or "").partition(":")
    count = NumberOption()(name, number if text else None)
    return count, parse_format(word if colon else "affine8")


class LayerRun(NamedTuple):
    """The format of consecutive layers; layers that attend count from 0."""

    first: int
    last: int
    format: LayerFormat


def parse_layers(name: str, text: str | None) -> tuple[LayerRun, ...]:
    """Parse ascending runs of layers with their formats: 0:affine8+3-5:turbo4v3."""
    option, runs = _format_option(name, text), list[LayerRun]()
    for run in (text or "").split("+"):
        numbers, _, word = run.partition(":")
        match = re.fullmatch("([0-9]{1,6})(?:-([0-9]{1,6}))?", numbers)
        if match is None:
            nearest = "-".join(re.findall("[0-9]{1,6}", numbers)[:2]) or "0"
            raise SpecError(
                f"option {option}: {short(run)} names no layers; allowed: N:FORMAT or N-M:FORMAT,"
                f" joined by +; nearest: {name}={nearest}:{short(word)[1:-1] or 'affine8'}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        minimum = runs[-1].last + 1 if runs else 0
        if not minimum <= first <= last < MAX_LAYERS:
            nearest = str(min(max(first, minimum), MAX_LAYERS - 1))
            raise SpecError(
                f"option {option}: layers {numbers}; allowed here: ascending layers from {minimum}"
                f" to {MAX_LAYERS - 1}, each once; nearest: {nearest}"
            )
        runs.append(LayerRun(first, last, parse_format(word)))
    return tuple(runs)


def _parse_amount(text: str) -> tuple[int, float, str]:
    """Parse a number, or a share such as 25%; the third result is the nearest allowed text."""
    count = int(re.split("[^0-9]", text, maxsplit=1)[0][:10] or 0)
    if text.endswith("%"):
        return 0, float(count), f"{min(max(1, count), 100)}%"
    return count, 0.0, f"{min(max(1, count), MAX_OPTION_VALUE)}"


def parse_select(name: str, text: str | None) -> tuple[PageSelection, int]:
    """Parse how many sealed pages a token reads, and the first layer that selects."""
    number, colon, first_layer = (text or "").partition(":")
    count, percent, nearest = _parse_amount(number)
    if nearest != number:
        raise SpecError(
            f"option {_format_option(name, text)}: allowed is a number of pages, or a share of them"
            f" from 1% to 100%; nearest: {name}={nearest}"
        )
    if colon and not re.fullmatch("[0-9]{1,9}", first_layer):
        raise SpecError(
            f"option {_format_option(name, text)}: allowed after the colon is the number of the"
            f" first layer that selects; nearest: {name}={number}:{NUM_UNSELECTED_LAYERS}"
        )
    return PageSelection(count, percent), int(first_layer) if colon else NUM_UNSELECTED_LAYERS


def parse_prune(name: str, text: str | None) -> Pruning:
    """Parse the score, the rows to keep after a prompt, and whether heads share them."""
    word, _, arguments = (text or "").partition(":")
    keep, has_mode, mode = arguments.partition(":")
    option = _format_option(name, text)
    if word not in SCORE_TABLE:
        nearest = f"{name}={find_nearest(word or 'snapkv', SCORE_TABLE)}:{keep or '25%'}"
        raise SpecError(
            f"option {option}: allowed is a score, {', '.join(SCORE_TABLE)}, then a colon and the"
            f" number of rows to keep; nearest: {nearest}"
        )
    count, percent, nearest = _parse_amount(keep)
    if nearest != keep or (has_mode and mode != ADAPTIVE):
        nearest += f":{ADAPTIVE}" if has_mode else ""
        raise SpecError(
            f"option {option}: allowed is a number of rows per head, or a share of the tokens"
            f" from 1% to 100%, and :{ADAPTIVE} if heads share them;"
            f" nearest: {name}={word}:{nearest if keep else '25%'}"
        )
    return Pruning(SCORE_TABLE[word](), count, percent, adaptive=bool(has_mode))


def parse_retain(name: str, text: str | None) -> Retention:
    """Parse the name of a retention rule that a program or a package adds."""
    rules = [rule for rule in RETENTION_TABLE if rule not in RETENTIONS]
    if text not in rules:
        nearest = f"{name}={find_nearest(text or '', rules)}" if rules else "window=4096"
        raise SpecError(
            f"option {_format_option(name, text)}: allowed is a registered retention rule, of"
            f" {', '.join(rules) or 'none here'}; nearest: {nearest}"
        )
    return RETENTION_TABLE[text]()


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
    "layers": parse_layers,
    "seed": NumberOption(),
    "select": parse_select,
    "prune": parse_prune,
    "retain": parse_retain,
}


class OptionWord(NamedTuple):
    """An option of a spec, as `kvant formats` and docs/formats.md describe it."""

    word: str
    default: str
    meaning: str
    use_case: str


OPTION_WORDS = tuple(
    OptionWord(*cells)
    for cells in split_table(f"""
window=N | all tokens \
    | keeps the last N tokens, and the first {DEFAULT_WINDOW_SINKS} unless sinks= is given \
    | bounded memory at any length
sinks=N | {DEFAULT_WINDOW_SINKS} with a window, else 0 | keeps the first N tokens, dense \
    | models attend to them; 0 with a window evicts them
select=N | all \
    | each token reads the first sealed page, the last 256 sealed rows, and N or P% of the others \
    | speed
prune=SCORE:KEEP | all | after a prompt each head keeps its best rows | memory
retain=NAME | none | the window and sinks of a registered rule | your own rules
tail=N | by format | the last N rows are read dense | less loss at few bits
start=N | 0 | rows stay dense until a sequence has N tokens | short prompts without loss
edge=N:FORMAT | 0:affine8 | the first and last N layers use another format | sensitive layers
layers=N:FORMAT | none | layer N, or layers N-M, use another format; + joins more \
    | what kvant.tune finds
group=N | by width | values per scale: 16, 32, 64, 128 (affine) | accuracy or size
rotate | off | rows are rotated before encoding (affine, fp8) | rows with outliers
smooth | off | channels are scaled before encoding, fitted to the model | rows with outliers
prefill=stored | dense | a prompt attends to its rows as stored, not as computed \
    | results that do not depend on chunks
slack=N | 16 | how many tokens back a rewind is exact | drafts, edits
page=N | 64 | rows per page, a multiple of 64 | fewer, larger pages
step=N | 1 | rows added by each allocation, in whole pages | fewer allocations
capacity=N | none | memory for N rows, allocated at once; more rows are an error | a fixed footprint
seed=N | 0 | seed of the rotation | repeating an experiment
""")
)


def parse_option(word: str) -> tuple[str, Any]:
    """Parse an option into its name and value."""
    name, equals, value = word.partition("=")
    if name in OPTION_PARSERS:
        return name, OPTION_PARSERS[name](name, value if equals else None)
    refuse_auto(name)
    nearest = find_nearest(name.strip(), OPTION_PARSERS)
    if nearest not in ("rotate", "smooth"):
        nearest += f"={short(value.strip())[1:-1] or 'N'}"
    raise SpecError(
        f"option {short(word)} is not known; allowed: {', '.join(OPTION_PARSERS)};"
        f" nearest: {nearest if word else 'no comma there'}"
    )


def parse_options(words: Iterable[str]) -> dict[str, Any]:
    """Parse options into a mapping of name to value."""
    options: dict[str, Any] = {}
    for word in words:
        name, value = parse_option(word)
        if name in options:
            raise SpecError(
                f"option {short(word)} follows another {name}; allowed: each option once;"
                f" nearest: {word} alone"
            )
        options[name] = value
    return options


def check_options(options: Mapping[str, Any], formats: Iterable[LayerFormat]) -> None:
    """Refuse options that contradict each other, or that no side of any format supports."""
    formats = tuple(formats)
    sides = [side for layer_format in formats for side in (layer_format.keys, layer_format.values)]
    words = "/".join(dict.fromkeys(side.word for side in sides))
    families = {side.family for side in sides}
    group, grouped = options.get("group"), [side for side in sides if side.family == "affine"]
    if group and not grouped:
        raise SpecError(
            f"option 'group={group}': this format has no groups; allowed with affine formats;"
            f" nearest: affine8,group={group}"
        )
    for side in grouped if group else ():
        if side.group not in (None, group):
            raise SpecError(
                f"option 'group={group}': {side.word} means group {side.group}; allowed with affine"
                f" formats; nearest: affine{side.bits},group={group}"
            )
    if "rotate" in options and not families & ROTATABLE_FAMILIES:
        reason = "is rotated already" if "turbo" in families else "has nothing to rotate"
        raise SpecError(
            f"option 'rotate': {words} {reason}; allowed with affine formats and fp8;"
            f" nearest: {words if 'turbo' in families else 'affine8,rotate'}"
        )
    if "smooth" in options and not families & SMOOTHABLE_FAMILIES:
        raise SpecError(
            f"option 'smooth': {words} has nothing to smooth; allowed with affine, turbo and fp8;"
            " nearest: affine8,smooth"
        )
    if "edge" in options and "layers" in options:
        raise SpecError(
            "option 'edge' with layers: both name the format of a layer; allowed: one of the two;"
            " nearest: no edge"
        )
    for name in ("window", "sinks", "prune"):
        if "retain" in options and name in options:
            raise SpecError(
                f"option '{name}' with retain: both say which rows stay; allowed: one of the two;"
                f" nearest: no {name}"
            )
    for name in ("window", "sinks"):
        if "prune" in options and name in options:
            raise SpecError(
                f"option '{name}={options[name]}' with prune: rows are dropped by age or by score;"
                f" allowed: one of the two; nearest: no {name}"
            )
    if "seed" in options and "rotate" not in options and "turbo" not in families:
        raise SpecError(
            f"option 'seed={options['seed']}': {words} has no rotation to seed; allowed with turbo"
            " formats and with rotate; nearest: no seed"
        )
    capacity = options.get("capacity", MAX_OPTION_VALUE)
    for name in ("window", "sinks"):
        if options.get(name, 0) > capacity:
            raise SpecError(
                f"option '{name}={options[name]}' with capacity={capacity} can never fill;"
                f" allowed: at most the capacity; nearest: {name}={capacity}"
            )
