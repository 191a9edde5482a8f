"""Parse the first word of a spec into the codecs of the keys and values of a layer.

    format := side | FAMILY K "v" V | side "/" side

A side is a name in SIDE_FORMATS, or a codec of CODECS that needs no arguments. Words are lower
case; an unknown word is a SpecError with the nearest known one. This module knows neither retention
nor layers, and of the options only those of CodecOptions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

from kvant.codecs import CODECS
from kvant.contracts import Codec
from kvant.errors import SpecError

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
# Names of llama.cpp, Ollama, mlx-lm, FFAI, OminiX-MLX, transformers and vLLM -> nearest format.
FOREIGN_NAMES = {
    **dict.fromkeys(("q8", "q8_1"), "q8_0"),
    **dict.fromkeys(("q4", "q4_1", "iq4_nl"), "q4_0"),
    **dict.fromkeys(("q5_0", "q5_1", "q5"), "affine5"),
    **{f"{word}{bits}": f"affine{bits}" for word in ("int", "kv", "k") for bits in (2, 3, 4, 6, 8)},
    **{
        f"{bits}{word}": f"affine{bits}" for word in ("bit", "bits", "") for bits in (2, 3, 4, 6, 8)
    },
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2", "f8_e4m3", "f8", "mxfp8", "float8"), "fp8"),
    **dict.fromkeys(
        ("mxfp4", "nvfp4", "fp4", "quanto", "hqq", "quantized", "affinequantized"), "affine4"
    ),
    **dict.fromkeys(("turboquant", "turbo", "tq4", "tq4_0"), "turbo4"),
    **dict.fromkeys(("tq3", "tq3_0"), "turbo3"),
    **dict.fromkeys(("tq2", "tq2_0"), "turbo2"),
    **dict.fromkeys(("none", "default", "dynamic", "concat", "dense", "standard"), "raw"),
    **dict.fromkeys(("fp16", "float16", "half"), "f16"),
    **dict.fromkeys(("bfloat16",), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float"), "f32"),
}
MODEL_ONLY_FORMATS = {
    "auto": "is found by trying formats on a model: it cannot be part of a spec, and only generate,"
    " Session, attach, run and chat accept it; nearest: affine8",
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
        build = CODEC_BUILDERS.get(self.family)
        codec: Any = build(self, options, seed) if build else CODECS[self.family]()
        if not (options.smooth and self.family in SMOOTHABLE_FAMILIES):
            return codec  # type: ignore[no-any-return]
        from kvant.codecs.frames import add_smoothing

        return replace(codec, frame=add_smoothing(codec.frame))  # type: ignore[no-any-return]


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
        from kvant.platform.dtypes import DTYPES

        return DTYPES[name]

    def make_codecs(self, options: CodecOptions, layer: int) -> tuple[Codec, Codec]:
        """Build the codecs of the keys and values of layer number `layer`."""
        # Layers, sides and seeds all rotate differently. Heads share one, as layers may be split.
        seed = (options.seed * MAX_LAYERS + layer) * 2
        return self.keys.make_codec(options, seed), self.values.make_codec(options, seed + 1)


def build_affine(side: SideFormat, options: CodecOptions, seed: int) -> Codec:
    from kvant.codecs import Affine
    from kvant.codecs.frames import Identity, Rotation

    group = side.group or options.group or DEFAULT_GROUPS[side.bits]
    return Affine(side.bits, group, Rotation(seed) if options.rotate else Identity())


def build_turbo(side: SideFormat, options: CodecOptions, seed: int) -> Codec:
    from kvant.codecs import Codebook
    from kvant.codecs.frames import Rotation

    return Codebook(side.bits, frame=Rotation(seed))


def build_fp8(side: SideFormat, options: CodecOptions, seed: int) -> Codec:
    from kvant.codecs import Fp8
    from kvant.codecs.frames import Identity, Rotation

    return Fp8(Rotation(seed) if options.rotate else Identity())


CODEC_BUILDERS: dict[str, Callable[[SideFormat, CodecOptions, int], Codec]] = {
    "affine": build_affine,
    "turbo": build_turbo,
    "fp8": build_fp8,
}

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
    sides = {**SIDE_FORMATS, **list_plain_codecs()}
    if name in sides:
        return sides[name]
    refuse_without_model(name.partition(":")[0])
    if name == word:
        allowed = ", ".join([FORMAT_SUMMARY, *list_plain_codecs()])
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


def list_plain_codecs() -> dict[str, SideFormat]:
    """List codecs named as in files, including those that users added to CODECS."""
    return {
        name: SideFormat(name, name)
        for name in CODECS
        if name not in SIDE_FORMATS
        and name not in CODECS_NAMED_BY_WIDTH
        and needs_no_arguments(CODECS[name])
    }


def needs_no_arguments(codec: Callable[..., object]) -> bool:
    return all(p.default is not p.empty for p in inspect.signature(codec).parameters.values())


def format_codecs(*codecs: Codec) -> str:
    """Format the codecs of a layer as in a spec: affine8, affine8v4, or affine8/turbo3."""
    words = list(dict.fromkeys(format_codec(codec) for codec in codecs))
    if len(words) == 2 and words[0][:-1] == words[1][:-1] in ("affine", "turbo"):
        return f"{words[0]}v{words[1][-1]}"
    return "/".join(words)


def format_codec(codec: Codec) -> str:
    """Format a codec as its family and width, or as its name in files."""
    from kvant.codecs import Affine, Codebook

    if isinstance(codec, Affine | Codebook):
        return f"{'affine' if isinstance(codec, Affine) else 'turbo'}{codec.bits}"
    names = (name for name, codec_class in CODECS.items() if codec_class is type(codec))
    return next(names, type(codec).__name__)


def refuse_without_model(word: str) -> None:
    """Refuse a format that only a model can determine."""
    if word in MODEL_ONLY_FORMATS:
        raise SpecError(f"{word} {MODEL_ONLY_FORMATS[word]}")


def find_nearest(word: str, names: Iterable[str]) -> str:
    """Return the name most similar to `word`, the first of several."""
    match = SequenceMatcher(b=word[:99].lower())

    def similarity(name: str) -> float:
        match.set_seq1(name)
        return match.ratio()

    return max(names, key=similarity)
