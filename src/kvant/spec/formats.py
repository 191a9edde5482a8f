"""The first word of a spec: the codec of the keys of a layer, and that of the values.

    format := side | FAMILY K "v" V | side "/" side

A side is a name in SIDES, or a codec of CODECS that is made without arguments. Words are lower
case; an unknown one is a SpecError with the nearest that there is. Knows no options but the three
that codecs are made from, and neither retention nor layers.
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

DEFAULT_GROUPS = {8: 64, 6: 64, 5: 32, 4: 32, 3: 32, 2: 16}  # width: values a scale covers
TURBO_WIDTHS = (4, 3, 2)
FAMILY_WIDTHS = {"affine": tuple(DEFAULT_GROUPS), "turbo": TURBO_WIDTHS, "aura": TURBO_WIDTHS}
CODECS_NAMED_BY_WIDTH = (
    "affine",
    "codebook",
)  # codecs that only FAMILY and width can name
ROTATABLE_FAMILIES = {"affine", "fp8"}  # families that the option asks; turbo is rotated anyway
RAW_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
SMOOTHABLE_FAMILIES = {"affine", "turbo", "fp8"}  # whose codecs take any frame
FORMAT_SUMMARY = (
    "raw, affine2|3|4|5|6|8, fp8, turbo2|3|4, two widths (affine8v4), two sides (fp8/turbo3),"
    " q8_0, q4_0, bf16, f16, f32"
)
# What other caches call it: llama.cpp and Ollama, mlx-lm, FFAI, OminiX-MLX, transformers, vLLM.
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
    "auto": "is found by trying formats on a model: it stands alone, and generate, Session,"
    " attach, run and chat take it; nearest: affine8",
}
MAX_LAYERS = 2**19  # rotation seeds then stay below 2**51, which any JSON reader keeps


@dataclass(frozen=True)
class CodecOptions:
    """The options that codecs are made from."""

    group: int | None = None
    rotate: bool = False
    smooth: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SideFormat:
    """What one word says about the keys, or about the values."""

    word: str
    family: str  # affine, fp8, turbo, or a disk name
    bits: int = 0
    group: int | None = None  # fixed by an alias
    dtype: str | None = None  # its name in torch

    def make_codec(self, options: CodecOptions, seed: int) -> Codec:
        build = CODEC_BUILDERS.get(self.family)
        codec: Any = build(self, options, seed) if build else CODECS[self.family]()
        if not (options.smooth and self.family in SMOOTHABLE_FAMILIES):
            return codec  # type: ignore[no-any-return]
        from kvant.codecs.frames import add_smoothing

        return replace(codec, frame=add_smoothing(codec.frame))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LayerFormat:
    """The keys and the values of a layer."""

    keys: SideFormat
    values: SideFormat

    @property
    def dtype(self) -> torch.dtype | None:
        name = self.keys.dtype or self.values.dtype
        if name is None:
            return None
        from kvant.dtypes import DTYPES

        return DTYPES[name]

    def make_codecs(self, options: CodecOptions, layer: int) -> tuple[Codec, Codec]:
        # No two layers, sides or seeds share a rotation. Heads do: layers may be split by head.
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
    """The format that `word` names, or a SpecError with the nearest that there is."""
    keys, slash, values = word.partition("/")
    if slash:
        return combine_sides(word, parse_side(keys, word), parse_side(values, word))
    if word in TWO_WIDTH_FORMATS:
        return TWO_WIDTH_FORMATS[word]
    side = parse_side(word, word)
    return LayerFormat(side, side)


def parse_side(name: str, word: str) -> SideFormat:
    sides = {**SIDE_FORMATS, **list_plain_codecs()}
    if name in sides:
        return sides[name]
    refuse_without_model(name.partition(":")[0])
    if name == word:
        allowed = ", ".join([FORMAT_SUMMARY, *list_plain_codecs()])
        near = translate_name(name) or find_nearest(name, [*sides, *TWO_WIDTH_FORMATS])
        raise SpecError(f"format {short(name)} is not known; allowed: {allowed}; nearest: {near}")
    known = translate_name(name)
    near = known if known in sides else find_nearest(name, sides)
    raise SpecError(
        f"format {short(name)} on one side of {short(word)} is not known;"
        f" allowed: {', '.join(sides)}; nearest: {near}"
    )


def translate_name(name: str) -> str | None:
    """What a name of another cache is called here; rotated 8 bits are no better than affine8."""
    if name.lower() in FOREIGN_NAMES:
        return FOREIGN_NAMES[name.lower()]
    found = re.fullmatch("(turbo|aura)([2348])(?:v([2348]))?|k([23468])v([23468])", name.lower())
    if found is None:
        return None
    family, keys, values, *affine = found.groups()
    if family is None:
        return f"affine{affine[0]}v{affine[1]}"
    sides = (f"{'affine' if bits == '8' else family}{bits}" for bits in (keys, values or keys))
    return "/".join(dict.fromkeys(sides))


def combine_sides(word: str, keys: SideFormat, values: SideFormat) -> LayerFormat:
    """Rows of both sides are dense in one dtype, so two raw sides must name the same one."""
    if keys.family == values.family == "raw" and keys.dtype != values.dtype:
        near = keys.word if keys.dtype else values.word
        raise SpecError(
            f"format {short(word)} names two dtypes; allowed: one of raw, {', '.join(RAW_DTYPES)}"
            f" for both sides; nearest: {near}"
        )
    return LayerFormat(keys, values)


def list_plain_codecs() -> dict[str, SideFormat]:
    """Codecs that go by their disk name, also those added to CODECS from outside."""
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
    """Write the codecs of a layer as a spec does: affine8, affine8v4, or affine8/turbo3."""
    words = list(dict.fromkeys(format_codec(codec) for codec in codecs))
    if len(words) == 2 and words[0][:-1] == words[1][:-1] in ("affine", "turbo"):
        return f"{words[0]}v{words[1][-1]}"
    return "/".join(words)


def format_codec(codec: Codec) -> str:
    """Its family and width, or its disk name."""
    from kvant.codecs import Affine, Codebook

    if isinstance(codec, Affine | Codebook):
        return f"{'affine' if isinstance(codec, Affine) else 'turbo'}{codec.bits}"
    names = (name for name, kind in CODECS.items() if kind is type(codec))
    return next(names, type(codec).__name__)


def refuse_without_model(word: str) -> None:
    if word in MODEL_ONLY_FORMATS:
        raise SpecError(f"{word} {MODEL_ONLY_FORMATS[word]}")


def find_nearest(word: str, names: Iterable[str]) -> str:
    """The name most like `word`, the first of several."""
    match = SequenceMatcher(b=word[:99].lower())

    def likeness(name: str) -> float:
        match.set_seq1(name)
        return match.ratio()

    return max(names, key=likeness)
