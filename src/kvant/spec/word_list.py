"""What the words of a spec are for: what `kvant formats` prints and docs/formats.md shows."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.retention import DEFAULT_WINDOW_SINKS


@dataclass(frozen=True)
class SpecWord:
    """A format or an option, as it is written."""

    word: str
    meaning: str
    use_case: str
    default: str = ""
    bits: float = 0.0  # of a format: for a key and a value together, in rows of 128 channels


FORMAT_WORDS = (
    SpecWord(
        "raw",
        "rows as the model computes them",
        "nothing may change; what others compare with",
        bits=32.0,
    ),
    SpecWord(
        "affine8",
        "8 bits, a scale and a bias for 64 values",
        "the first to try: safe on models",
        bits=17.0,
    ),
    SpecWord(
        "affine6",
        "6 bits, a scale and a bias for 64 values",
        "a little less than affine8",
        bits=13.0,
    ),
    SpecWord(
        "affine5",
        "5 bits, a scale and a bias for 32 values",
        "between affine6 and affine4",
        bits=12.0,
    ),
    SpecWord(
        "affine4",
        "4 bits, a scale and a bias for 32 values",
        "a third of raw; probe it first",
        bits=10.0,
    ),
    SpecWord(
        "affine3", "3 bits, a scale and a bias for 32 values", "where memory decides", bits=8.0
    ),
    SpecWord(
        "affine2",
        "2 bits, a scale and a bias for 16 values",
        "research: few models take it",
        bits=8.0,
    ),
    SpecWord(
        "affine8v4",
        "keys in 8 bits, values in 4; any two widths",
        "keys are the harder side",
        bits=13.5,
    ),
    SpecWord("fp8", "8-bit floats (E4M3), a scale for a row", "rows without outliers", bits=16.25),
    SpecWord(
        "turbo4",
        "4 bits of a codebook, rotated, a scale for a row",
        "the smallest with 4 bits",
        bits=8.25,
    ),
    SpecWord(
        "turbo3", "3 bits of a codebook, rotated, a scale for a row", "a fifth of raw", bits=6.25
    ),
    SpecWord("turbo2", "2 bits of a codebook, rotated, a scale for a row", "research", bits=4.25),
    SpecWord(
        "turbo4v2",
        "keys in 4 bits, values in 2; any two widths",
        "a fifth of raw; turbo3 may do less harm",
        bits=6.25,
    ),
    SpecWord(
        "fp8/turbo3",
        "two formats: of the keys, and of the values",
        "what one side needs",
        bits=11.25,
    ),
    SpecWord(
        "bf16",
        "raw in that dtype, whatever the model has (f16, f32)",
        "to fix the dtype",
        bits=32.0,
    ),
    SpecWord(
        "q8_0",
        "affine8 with 32 values to a scale (llama.cpp's name)",
        "coming from llama.cpp",
        bits=18.0,
    ),
    SpecWord(
        "q4_0",
        "affine4 with 32 values to a scale (llama.cpp's name)",
        "coming from llama.cpp",
        bits=10.0,
    ),
    SpecWord("aura4v2", "turbo4v2 (FFAI's name); any two widths", "coming from FFAI", bits=6.25),
)

AUTO_WORD = SpecWord(
    "auto",
    "the smallest spec that stays within limits on the model: auto:1GiB,max_kl=0.01,max_lost=0.1",
    "when in doubt; a first start tries formats, the next ones know the choice",
)

OPTION_WORDS = (
    SpecWord(
        "window=N",
        f"the last N tokens stay, and the first {DEFAULT_WINDOW_SINKS} unless sinks= says "
        "otherwise",
        "a bound on memory, whatever comes",
        "all stay",
    ),
    SpecWord(
        "sinks=N",
        "the first N tokens stay, dense",
        "models lean on them; 0 with a window lets them go",
        f"{DEFAULT_WINDOW_SINKS} with a window, else 0",
    ),
    SpecWord(
        "select=N",
        "a token reads the first sealed page, and N others or P% of them",
        "speed",
        "all",
    ),
    SpecWord(
        "prune=SCORE:KEEP",
        "behind a prompt a head keeps its best rows",
        "memory",
        "all",
    ),
    SpecWord(
        "tail=N", "the last N rows are seen dense", "less loss in few bits", "as the format asks"
    ),
    SpecWord("start=N", "all is dense until there are N tokens", "short prompts without loss", "0"),
    SpecWord(
        "edge=N:FORMAT", "first and last N layers in another format", "hard layers", "0:affine8"
    ),
    SpecWord(
        "group=N", "values to a scale: 16, 32, 64, 128 (affine)", "accuracy or size", "by width"
    ),
    SpecWord("rotate", "rows are rotated before (affine, fp8)", "rows with outliers", "off"),
    SpecWord("smooth", "channels are scaled before, as a probe found", "rows with outliers", "off"),
    SpecWord(
        "prefill=stored", "a prompt reads its rows as they are stored", "chunks agree", "dense"
    ),
    SpecWord("slack=N", "how far back a rewind is exact", "drafts, edits", "16"),
    SpecWord("page=N", "rows of a page, a multiple of 64", "fewer, larger pieces", "64"),
    SpecWord("step=N", "rows by which memory grows, in whole pages", "fewer allocations", "1"),
    SpecWord(
        "capacity=N", "memory for N rows at once; more is an error", "a fixed footprint", "none"
    ),
    SpecWord("seed=N", "of the rotation", "repeating an experiment", "0"),
)
