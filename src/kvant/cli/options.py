"""The options and tables that several commands share, and the spec that options add up to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer import Option

PIPE_WIDTH = 160  # where nobody looks, nothing is cut off


def blank() -> tuple[Console, Table]:
    """Standard output, which takes text as it is, and an empty table for it."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console, Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)


Model = Annotated[str | None, Option(help="A folder or a name on the hub; else the one inside.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run code of the model's.")]
KVCache = Annotated[str | None, Option(help="How the cache is stored: affine4, raw, auto, ...")]
WindowSize = Annotated[int | None, Option(help="Keep the last N positions ...")]
WindowKeep = Annotated[int | None, Option(help="... and the first N beside them.")]
MaxNewTokens = Annotated[int, Option(min=1)]
Temperature = Annotated[float, Option(min=0.0)]
TopP = Annotated[float | None, Option()]
TopK = Annotated[int | None, Option(min=1)]
MinP = Annotated[float | None, Option()]
Seed = Annotated[int | None, Option(help="The same seed says the same.")]
MaxContext = Annotated[int | None, Option(min=2)]
Strategy = Annotated[str, Option(help="always, disabled, long or adaptive.")]
Threshold = Annotated[int, Option(help="Tokens from which on `long` keeps anything.")]
Budget = Annotated[str | None, Option(help="Bytes that `adaptive` may take: 64MiB.")]
PrefillChunk = Annotated[int, Option(min=1, help="Tokens of a prompt that are read at once.")]
Draft = Annotated[str | None, Option(help="Guess ahead: ngram, or a smaller model.")]
Backend = Annotated[
    str | None, Option(help="What reads the cache: native, triton, reference; else what can.")
]
Guard = Annotated[bool, Option(help="Warn where the format does the model harm.")]
Load = Annotated[Path | None, Option(help="Go on from a saved conversation.")]
Device = Annotated[
    str | None, Option(help="cpu, cuda, cuda:1, mps; else a CUDA GPU if it is there.")
]
DType = Annotated[str, Option(help="float32, bfloat16, float16; auto: as in the checkpoint.")]
Stats = Annotated[bool, Option(help="Say what it took.")]
Json = Annotated[bool, Option(help="Print one JSON object and nothing else.")]


def spec_of(kv_cache: str | None, size: int | None, keep: int | None) -> str:
    """One spec of a spec and the flags beside it; what is said twice is refused."""
    spec = "raw" if kv_cache is None else kv_cache
    named = {word.strip().partition("=")[0] for word in spec.split(",")}
    for flag, option, value in (
        ("--kv-window-size", "window", size),
        ("--kv-window-keep", "sinks", keep),
    ):
        if value is None:
            continue
        if option in named:
            raise ValueError(f"{flag} {value} beside --kv-cache {spec}, which says {option}= too")
        spec += f",{option}={value}"
    if keep is not None and size is None and "window" not in named:
        raise ValueError(f"--kv-window-keep {keep} without a window: give --kv-window-size too")
    return spec
