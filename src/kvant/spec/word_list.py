"""Describe every word of a spec, for `kvant formats` and docs/formats.md."""

from __future__ import annotations

from dataclasses import dataclass

from kvant.retention import DEFAULT_WINDOW_SINKS


@dataclass(frozen=True)
class SpecWord:
    """One format or option, with its description."""

    word: str
    meaning: str
    use_case: str
    default: str = ""
    bits: float = 0.0  # of a format: one key and one value together, in rows of 128 channels


FORMAT_WORDS = (
    SpecWord(
        "raw",
        "rows as the model computes them",
        "exact results; the reference for other formats",
        bits=32.0,
    ),
    SpecWord(
        "affine8",
        "8 bits, a scale and a bias per 64 values",
        "the first to try: safe on models",
        bits=17.0,
    ),
    SpecWord(
        "affine6",
        "6 bits, a scale and a bias per 64 values",
        "a little less than affine8",
        bits=13.0,
    ),
    SpecWord(
        "affine5",
        "5 bits, a scale and a bias per 32 values",
        "between affine6 and affine4",
        bits=12.0,
    ),
    SpecWord(
        "affine4",
        "4 bits, a scale and a bias per 32 values",
        "a third of raw; probe it first",
        bits=10.0,
    ),
    SpecWord("affine3", "3 bits, a scale and a bias per 32 values", "very tight memory", bits=8.0),
    SpecWord(
        "affine2",
        "2 bits, a scale and a bias per 16 values",
        "research: few models tolerate it",
        bits=8.0,
    ),
    SpecWord(
        "affine8v4",
        "keys in 8 bits, values in 4; any two widths",
        "keys need more bits than values",
        bits=13.5,
    ),
    SpecWord("fp8", "8-bit floats (E4M3), a scale per row", "rows without outliers", bits=16.25),
    SpecWord(
        "turbo4",
        "4 bits of a codebook, rotated, a scale per row",
        "the smallest with 4 bits",
        bits=8.25,
    ),
    SpecWord(
        "turbo3", "3 bits of a codebook, rotated, a scale per row", "a fifth of raw", bits=6.25
    ),
    SpecWord("turbo2", "2 bits of a codebook, rotated, a scale per row", "research", bits=4.25),
    SpecWord(
        "turbo4v2",
        "keys in 4 bits, values in 2; any two widths",
        "a fifth of raw; turbo3 may lose less",
        bits=6.25,
    ),
    SpecWord(
        "fp8/turbo3",
        "one format for keys, another for values",
        "keys and values with different needs",
        bits=11.25,
    ),
    SpecWord(
        "bf16",
        "raw in this dtype, whatever the model's (also f16, f32)",
        "a fixed dtype",
        bits=32.0,
    ),
    SpecWord(
        "q8_0",
        "affine8 with 32 values per scale (llama.cpp's name)",
        "coming from llama.cpp",
        bits=18.0,
    ),
    SpecWord(
        "q4_0",
        "affine4 with 32 values per scale (llama.cpp's name)",
        "coming from llama.cpp",
        bits=10.0,
    ),
    SpecWord("aura4v2", "turbo4v2 (FFAI's name); any two widths", "coming from FFAI", bits=6.25),
)

AUTO_WORD = SpecWord(
    "auto",
    "the smallest format within loss limits, tried on the model: "
    "auto:1GiB,max_kl=0.01,max_lost=0.1",
    "when in doubt; the first start tries formats, later starts reuse the choice",
)

OPTION_WORDS = (
    SpecWord(
        "window=N",
        f"keeps the last N tokens, and the first {DEFAULT_WINDOW_SINKS} unless sinks= is given",
        "bounded memory at any length",
        "all tokens",
    ),
    SpecWord(
        "sinks=N",
        "keeps the first N tokens, dense",
        "models attend to them; 0 with a window evicts them",
        f"{DEFAULT_WINDOW_SINKS} with a window, else 0",
    ),
    SpecWord(
        "select=N",
        "each token reads the first sealed page, and N others or P% of them",
        "speed",
        "all",
    ),
    SpecWord(
        "prune=SCORE:KEEP",
        "after a prompt each head keeps its best rows",
        "memory",
        "all",
    ),
    SpecWord("tail=N", "the last N rows are read dense", "less loss at few bits", "by format"),
    SpecWord("start=N", "all rows are dense below N tokens", "short prompts without loss", "0"),
    SpecWord(
        "edge=N:FORMAT",
        "the first and last N layers use another format",
        "sensitive layers",
        "0:affine8",
    ),
    SpecWord(
        "group=N", "values per scale: 16, 32, 64, 128 (affine)", "accuracy or size", "by width"
    ),
    SpecWord(
        "rotate", "rows are rotated before encoding (affine, fp8)", "rows with outliers", "off"
    ),
    SpecWord(
        "smooth",
        "channels are scaled before encoding, fitted to the model",
        "rows with outliers",
        "off",
    ),
    SpecWord(
        "prefill=stored",
        "a prompt attends to its rows as stored, not as computed",
        "results that do not depend on chunks",
        "dense",
    ),
    SpecWord("slack=N", "how many tokens back a rewind is exact", "drafts, edits", "16"),
    SpecWord("page=N", "rows per page, a multiple of 64", "fewer, larger pages", "64"),
    SpecWord("step=N", "rows added by each allocation, in whole pages", "fewer allocations", "1"),
    SpecWord(
        "capacity=N",
        "memory for N rows, allocated at once; more rows are an error",
        "a fixed footprint",
        "none",
    ),
    SpecWord("seed=N", "seed of the rotation", "repeating an experiment", "0"),
)
