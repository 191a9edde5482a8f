"""The options that several commands share, and the checks of what was typed.

They find what is wrong as far as it can be known before a model is loaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from kvant.errors import CacheError, CacheFileError
from kvant.retention import DEFAULT_WINDOW_SINKS

if TYPE_CHECKING:  # help and mistakes are shown without torch, which takes seconds to import
    from kvant.cache.files import CacheFileHeader
    from kvant.generation.conversation import Transcript


Model = Annotated[str | None, Option(help="A folder or a name on the hub; else the one inside.")]
TrustRemoteCode = Annotated[bool, Option("--trust-remote-code", help="Run code of the model's.")]
KVCache = Annotated[
    str | None, Option(help="How the cache is stored: affine4, raw, auto; kvant formats has all.")
]
WindowSize = Annotated[int | None, Option(help="Keep the last N positions ...")]
WindowKeep = Annotated[
    int | None,
    Option(help=f"... and the first N beside them ({DEFAULT_WINDOW_SINKS} unless given)."),
]
MaxNewTokens = Annotated[int, Option(min=1, help="Tokens of a reply, at most.")]
DEFAULT_MAX_NEW_TOKENS = 256  # unless said, as in Python
Temperature = Annotated[float, Option(min=0.0, help="0 takes the likeliest token; 1 draws.")]
TopP = Annotated[float | None, Option(help="Draw among the likeliest that sum up to this.")]
TopK = Annotated[int | None, Option(min=1, help="Draw among so many of the likeliest.")]
MinP = Annotated[float | None, Option(help="Draw what is this likely beside the likeliest.")]
RepetitionPenalty = Annotated[
    float, Option(help="More than 1: what prompt or reply have said is said less.")
]
PresencePenalty = Annotated[float, Option(help="Taken from the logits of what the reply said.")]
FrequencyPenalty = Annotated[float, Option(help="Taken as often as the reply said it.")]
Stop = Annotated[list[str] | None, Option(help="End before this text; again for more.")]
Seed = Annotated[int | None, Option(help="The same seed says the same.")]
MaxContext = Annotated[int | None, Option(min=2, help="Tokens of prompt and reply, at most.")]
Strategy = Annotated[str, Option(help="always, disabled, long or adaptive.")]
Threshold = Annotated[int, Option(help="Tokens from which on `long` keeps anything.")]
Budget = Annotated[str | None, Option(help="Bytes that `adaptive` may take: 64MiB.")]
PrefillChunk = Annotated[int, Option(min=1, help="Tokens of a prompt that are read at once.")]
Draft = Annotated[str | None, Option(help="Guess ahead: ngram, or a smaller model.")]
Backend = Annotated[
    str | None, Option(help="What reads the cache: native, triton, reference; else what can.")
]
Pack = Annotated[bool, Option(help="Weights of 16 bits on a CPU are packed for it.")]
Guard = Annotated[
    bool, Option(help="Try the format on the model, 2 s at most, and warn where it does harm.")
]
Load = Annotated[Path | None, Option(help="Go on from a saved conversation.")]
Store = Annotated[
    list[str] | None,
    Option(help="Begin with what was read before, from a folder or a URL; several: nearest first."),
]
Device = Annotated[
    str | None, Option(help="cpu, cuda, cuda:1, mps; else a CUDA GPU if it is there.")
]
DType = Annotated[str, Option(help="float32, bfloat16, float16; auto: as in the checkpoint.")]
Stats = Annotated[bool, Option(help="Say what it took.")]
Json = Annotated[bool, Option(help="Print one JSON object and nothing else.")]


BACKENDS = ["native", "triton", "reference", "dequantize", "interpreted"]  # of kvant.attention


def merge_spec(kv_cache: str | None, window_size: int | None, num_sinks: int | None) -> str:
    """One spec of a spec and the flags beside it; what is said twice is refused."""
    spec = "raw" if kv_cache is None else kv_cache
    named = {word.strip().partition("=")[0] for word in spec.split(",")}
    for flag, option, value in (
        ("--kv-window-size", "window", window_size),
        ("--kv-window-keep", "sinks", num_sinks),
    ):
        if value is None:
            continue
        if option in named:
            raise ValueError(f"{flag} {value} beside --kv-cache {spec}, which says {option}= too")
        spec += f",{option}={value}"
    if num_sinks is not None and window_size is None and "window" not in named:
        raise ValueError(
            f"--kv-window-keep {num_sinks} without a window: give --kv-window-size too"
        )
    return spec


RowShape = tuple[int, int]  # heads of keys, channels of each


def check_readable(path: Path, flag: str) -> None:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file")


def check_writable(path: Path, flag: str) -> None:
    """Said before the work, and not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: the name of a file in a folder that exists is needed")


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} cannot be read: it is no text in UTF-8") from None
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def check_text(text: str, source: str) -> str:
    """Bytes that are no text come as lone surrogates, and no tokenizer takes them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{source} is no text in UTF-8") from None
    return text


def check_backend(name: str | None) -> None:
    """Refuse a name that no backend has, without importing torch."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend {name!r} is not one of {BACKENDS}")


def check_stores(names: list[str] | None) -> None:
    """Refuse names that no store can have, without importing torch."""
    from kvant.stores.open import check_name

    for name in names or ():
        check_name(name)


def check_send_options(send_options: Mapping[str, Any], max_context: int | None) -> None:
    """How tokens are drawn, how many, and before what they end."""
    from kvant.generation.settings import Sampling, StopConditions

    drawn = dict(send_options)
    ends = {"max_new_tokens": drawn.pop("max_new_tokens"), "stop": drawn.pop("stop")}
    Sampling(**drawn)
    StopConditions(**ends, max_context=max_context)


def check_transcript(path: Path, model: str | None) -> Transcript:
    """A whole file with a conversation in it, of a model of this shape where a folder tells it.

    The weights may still be others: that is found when they are there.
    """
    check_readable(path, "--load")
    from kvant.cache.files import read_header
    from kvant.generation.conversation import Transcript

    head = read_header(path)
    said = Transcript.from_header(path, head.about)
    found, own = _read_row_shapes(head), _read_model_row_shapes(model)
    if own is not None and found and found != own:  # a text of one token has no rows yet
        raise CacheFileError(
            f"--load {path}: a conversation with another model: it holds "
            f"{_format_row_shapes(found)}, and "
            f"--model has {_format_row_shapes(own)}"
        )
    return said


def _read_row_shapes(head: CacheFileHeader) -> list[RowShape]:
    """Of the layers that keep any."""
    return [
        (head.count_key_heads(name), tensor.shape[2])
        for index in range(len(head.spec.layers))
        for name, tensor in head.tensors.items()
        if name.startswith(f"{index}/") and name.endswith("keys.open")
    ]


def _read_model_row_shapes(model: str | None) -> list[RowShape] | None:
    """None where only the model itself can tell."""
    from kvant.checkpoints import find_config_file
    from kvant.models import layer_shapes

    file = find_config_file(model)
    try:
        told = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        shapes = None if told is None else layer_shapes(told)
    except (CacheError, OSError, ValueError):  # loading it says why, or knows more
        return None
    return (
        None if shapes is None else [(one.num_heads, one.key_dim) for one in shapes if one.attends]
    )


def _format_row_shapes(rows: Iterable[RowShape]) -> str:
    """28 layers of 8 heads of 128"""
    counted = Counter(rows)
    told = [f"{count} layers of {heads} heads of {dim}" for (heads, dim), count in counted.items()]
    return " and ".join(told) or "no rows"
