"""Parse the first word of a spec into the codecs of the keys and values of a layer.

    format := side | FAMILY K "v" V | side "/" side

A side is a name in SIDE_FORMATS, or another name in CODEC_TABLE. Words are lower
case; an unknown word is a SpecError with the nearest known one. This module knows neither retention
nor layers, and of the options only those of CodecOptions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, NamedTuple

from kvant.contracts import Codec
from kvant.errors import SpecError
from kvant.spec.tables import CODEC_TABLE

if TYPE_CHECKING:
    import torch

DEFAULT_GROUPS = {8: 64, 6: 64, 5: 32, 4: 32, 3: 32, 2: 16}  # bits -> values per scale
TURBO_WIDTHS = (4, 3, 2)
FAMILY_WIDTHS = {"affine": tuple(DEFAULT_GROUPS), "turbo": TURBO_WIDTHS, "aura": TURBO_WIDTHS}
CODECS_NAMED_BY_WIDTH = ("affine", "codebook")  # a spec names them by family and width only
ROTATABLE_FAMILIES = {"affine", "fp8"}  # families that `rotate` applies to; turbo always rotates
RAW_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
SMOOTHABLE_FAMILIES = {"affine", "turbo", "fp8"}  # families whose codecs accept any frame
FORMAT_SUMMARY = (
    "raw, affine2|3|4|5|6|8, fp8, turbo2|3|4, two widths (affine8v4), two sides (fp8/turbo3),"
    " q8_0, q4_0, bf16, f16, f32"
)
# Names of llama.cpp, Ollama, mlx-lm, FFAI, OminiX-MLX, transformers and vLLM, by nearest format.
_FOREIGN_NAMES = {
    "q8_0": "q8 q8_1",
    "q4_0": "q4 q4_1 iq4_nl",
    "affine5": "q5_0 q5_1 q5",
    "affine4": "mxfp4 nvfp4 fp4 quanto hqq quantized affinequantized",
    "fp8": "fp8_e4m3 fp8_e5m2 f8_e4m3 f8 mxfp8 float8",
    "turbo4": "turboquant turbo tq4 tq4_0",
    "turbo3": "tq3 tq3_0",
    "turbo2": "tq2 tq2_0",
    "raw": "none default dynamic concat dense standard",
    "f16": "fp16 float16 half",
    "bf16": "bfloat16",
    "f32": "fp32 float32 float",
}
FOREIGN_NAMES = {word: name for name, words in _FOREIGN_NAMES.items() for word in words.split()} | {
    word: f"affine{bits}"
    for bits in (2, 3, 4, 6, 8)
    for word in f"int{bits} kv{bits} k{bits} {bits}bit {bits}bits {bits}".split()
}
MAX_LAYERS = 2**19  # rotation seeds then stay below 2**51, which any JSON reader keeps


@dataclass(frozen=True)
class CodecOptions:
    """The options that configure codecs."""

    group: int | None = None
    rotate: bool = False
    smooth: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SideFormat:
    """The format of one side: the keys, or the values."""

    word: str
    family: str  # affine, fp8, turbo, or the name of a codec in files
    bits: int = 0
    group: int | None = None  # fixed by an alias such as q8_0
    dtype: str | None = None  # name in torch

    def make_codec(self, options: CodecOptions, seed: int) -> Codec:
        """Build the codec of this side."""
        from kvant.codecs import Affine, Codebook, Fp8
        from kvant.codecs.frames import Identity, Rotation, add_smoothing

        frame = Rotation(seed) if options.rotate else Identity()
        codec: Any
        if self.family == "affine":
            group = self.group or options.group or DEFAULT_GROUPS[self.bits]
            codec = Affine(self.bits, group, frame)
        elif self.family == "turbo":
            codec = Codebook(self.bits, frame=Rotation(seed))
        else:
            codec = Fp8(frame) if self.family == "fp8" else CODEC_TABLE[self.family]()
        if options.smooth and self.family in SMOOTHABLE_FAMILIES:
            codec = replace(codec, frame=add_smoothing(codec.frame))
        return codec  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerFormat:
    """The formats of the keys and the values of a layer."""

    keys: SideFormat
    values: SideFormat

    @property
    def dtype(self) -> torch.dtype | None:
        name = self.keys.dtype or self.values.dtype
        if name is None:
            return None
        from kvant.platform.torch_runtime import DTYPES

        return DTYPES[name]

    def make_codecs(self, options: CodecOptions, layer: int) -> tuple[Codec, Codec]:
        """Build the codecs of the keys and values of layer number `layer`."""
        # Layers, sides and seeds all rotate differently. Heads share one, as layers may be split.
        seed = (options.seed * MAX_LAYERS + layer) * 2
        return self.keys.make_codec(options, seed), self.values.make_codec(options, seed + 1)


SIDE_FORMATS: dict[str, SideFormat] = {
    "raw": SideFormat("raw", "raw"),
    **{f"affine{bits}": SideFormat(f"affine{bits}", "affine", bits) for bits in DEFAULT_GROUPS},
    **{f"turbo{bits}": SideFormat(f"turbo{bits}", "turbo", bits) for bits in TURBO_WIDTHS},
    **{f"aura{bits}": SideFormat(f"aura{bits}", "turbo", bits) for bits in TURBO_WIDTHS},
    "aura": SideFormat("aura", "turbo", 4),
    "fp8": SideFormat("fp8", "fp8"),
    "q8_0": SideFormat("q8_0", "affine", 8, group=32),
    "q4_0": SideFormat("q4_0", "affine", 4, group=32),
    **{word: SideFormat(word, "raw", dtype=dtype) for word, dtype in RAW_DTYPES.items()},
}
TWO_WIDTH_FORMATS: dict[str, LayerFormat] = {
    f"{family}{k}v{v}": LayerFormat(SIDE_FORMATS[f"{family}{k}"], SIDE_FORMATS[f"{family}{v}"])
    for family, widths in FAMILY_WIDTHS.items()
    for k in widths
    for v in widths
}


def split_table(text: str) -> list[list[str]]:
    """Return the cells of a table: one row a line, with `|` between cells."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().splitlines()]


class FormatWord(NamedTuple):
    """A format of a spec, as `kvant formats` and docs/formats.md describe it."""

    word: str
    bits: float  # of one key and one value together, in rows of 128 channels
    meaning: str
    use_case: str


FORMAT_WORDS = tuple(
    FormatWord(word, float(bits), meaning, use_case)
    for word, bits, meaning, use_case in split_table("""
raw | 32 | rows as the model computes them | exact results; the reference for other formats
affine8 | 17 | 8 bits, a scale and a bias per 64 values | the first to try: safe on models
affine6 | 13 | 6 bits, a scale and a bias per 64 values | a little less than affine8
affine5 | 12 | 5 bits, a scale and a bias per 32 values | between affine6 and affine4
affine4 | 10 | 4 bits, a scale and a bias per 32 values | a third of raw; probe it first
affine3 | 8 | 3 bits, a scale and a bias per 32 values | very tight memory
affine2 | 8 | 2 bits, a scale and a bias per 16 values | research: few models tolerate it
affine8v4 | 13.5 | keys in 8 bits, values in 4; any two widths | keys need more bits than values
fp8 | 16.25 | 8-bit floats (E4M3), a scale per row | rows without outliers
turbo4 | 8.25 | 4 bits of a codebook, rotated, a scale per row | the smallest with 4 bits
turbo3 | 6.25 | 3 bits of a codebook, rotated, a scale per row | a fifth of raw
turbo2 | 4.25 | 2 bits of a codebook, rotated, a scale per row | research
turbo4v2 | 6.25 | keys in 4 bits, values in 2; any two widths | a fifth of raw; turbo3 may lose less
fp8/turbo3 | 11.25 | one format for keys, another for values | keys and values with different needs
bf16 | 32 | raw in this dtype, whatever the model's (also f16, f32) | a fixed dtype
q8_0 | 18 | affine8 with 32 values per scale (llama.cpp's name) | coming from llama.cpp
q4_0 | 10 | affine4 with 32 values per scale (llama.cpp's name) | coming from llama.cpp
aura4v2 | 6.25 | turbo4v2 (FFAI's name); any two widths | coming from FFAI
""")
)
AUTO_WORD = FormatWord(
    "auto",
    0.0,  # any
    "the smallest format within loss limits, tried on the model: "
    "auto:1GiB,max_kl=0.01,max_lost=0.1; or the best in given bits, by layer: auto:3.25bits",
    "when in doubt; the first start tries formats, later starts reuse the choice",
)


def parse_format(word: str) -> LayerFormat:
    """Parse a format, or raise a SpecError with the nearest one."""
    keys, slash, values = word.partition("/")
    if slash:
        return combine_sides(word, parse_side(keys, word), parse_side(values, word))
    if word in TWO_WIDTH_FORMATS:
        return TWO_WIDTH_FORMATS[word]
    side = parse_side(word, word)
    return LayerFormat(side, side)


def parse_side(name: str, word: str) -> SideFormat:
    """Parse the format `name` of one side of `word`."""
    if name in SIDE_FORMATS:
        return SIDE_FORMATS[name]
    if name in CODEC_TABLE and name not in CODECS_NAMED_BY_WIDTH:
        CODEC_TABLE[name]  # import it here, so that one that cannot be used is refused at once
        return SideFormat(name, name)
    refuse_auto(name.partition(":")[0])
    others = [x for x in CODEC_TABLE if x not in (*SIDE_FORMATS, *CODECS_NAMED_BY_WIDTH)]
    sides = [*SIDE_FORMATS, *others]
    if name == word:
        allowed = ", ".join([FORMAT_SUMMARY, *others])
        nearest = translate_name(name) or find_nearest(name, [*sides, *TWO_WIDTH_FORMATS])
        raise SpecError(
            f"format {short(name)} is not known; allowed: {allowed}; nearest: {nearest}"
        )
    translated = translate_name(name)
    nearest = translated if translated in sides else find_nearest(name, sides)
    raise SpecError(
        f"format {short(name)} on one side of {short(word)} is not known;"
        f" allowed: {', '.join(sides)}; nearest: {nearest}"
    )


def translate_name(name: str) -> str | None:
    """Translate a name of another cache; rotated 8 bits are no better than affine8."""
    if name.lower() in FOREIGN_NAMES:
        return FOREIGN_NAMES[name.lower()]
    match = re.fullmatch("(turbo|aura)([2348])(?:v([2348]))?|k([23468])v([23468])", name.lower())
    if match is None:
        return None
    family, keys, values, *affine = match.groups()
    if family is None:
        return f"affine{affine[0]}v{affine[1]}"
    sides = (f"{'affine' if bits == '8' else family}{bits}" for bits in (keys, values or keys))
    return "/".join(dict.fromkeys(sides))


def combine_sides(word: str, keys: SideFormat, values: SideFormat) -> LayerFormat:
    """Combine two sides; refuse raw sides of two dtypes, since dense rows have one dtype."""
    if keys.family == values.family == "raw" and keys.dtype != values.dtype:
        nearest = keys.word if keys.dtype else values.word
        raise SpecError(
            f"format {short(word)} names two dtypes; allowed: one of raw, {', '.join(RAW_DTYPES)}"
            f" for both sides; nearest: {nearest}"
        )
    return LayerFormat(keys, values)


def format_codecs(*codecs: Codec) -> str:
    """Format the codecs of a layer as in a spec: affine8, affine8v4, or affine8/turbo3."""
    words = list(dict.fromkeys(format_codec(codec) for codec in codecs))
    if len(words) == 2 and words[0][:-1] == words[1][:-1] in ("affine", "turbo"):
        return f"{words[0]}v{words[1][-1]}"
    return "/".join(words)


def format_layers(words: Sequence[str]) -> str:
    """Format the formats of all layers as in a spec: turbo3,layers=0:affine8+4-5:turbo4."""
    main, runs, first = Counter(words).most_common(1)[0][0], list[str](), 0
    for word, same in groupby(words):
        last = first + len([*same]) - 1
        if word != main:
            runs.append(f"{first}:{word}" if first == last else f"{first}-{last}:{word}")
        first = last + 1
    return f"{main},layers={'+'.join(runs)}" if runs else main


def format_codec(codec: Codec) -> str:
    """Format a codec as its family and width, or as its name in files."""
    from kvant.codecs import Affine, Codebook

    if type(codec) in (Affine, Codebook):
        bits = codec.form.bits if codec.form is not None else 0
        return f"{'affine' if type(codec) is Affine else 'turbo'}{bits}"
    return CODEC_TABLE.find_name(type(codec)) or type(codec).__name__


def refuse_auto(word: str) -> None:
    """Refuse the format that only a model can determine."""
    if word == AUTO_WORD.word:
        raise SpecError(
            "auto is found by trying formats on a model: it cannot be part of a spec, and is"
            " accepted only where a model is loaded; nearest: affine8"
        )


def find_nearest(word: str, names: Iterable[str]) -> str:
    """Return the name most similar to `word`, the first of several."""
    match = SequenceMatcher(b=word[:99].lower())

    def similarity(name: str) -> float:
        match.set_seq1(name)
        return match.ratio()

    return max(names, key=similarity)
