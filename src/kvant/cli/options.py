"""Options shared by several commands, and checks of their values before a model is loaded."""

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


Model = Annotated[
    str | None, Option(help="Folder or name on the hub; default: the model inside the package.")
]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
KVCache = Annotated[
    str | None, Option(help="Cache format: affine4, raw, auto; kvant formats lists all.")
]
WindowSize = Annotated[int | None, Option(help="Window of the last N positions to store.")]
WindowKeep = Annotated[
    int | None,
    Option(
        help=f"Sinks: the first N positions, stored besides the window (default "
        f"{DEFAULT_WINDOW_SINKS})."
    ),
]
MaxNewTokens = Annotated[int, Option(min=1, help="Limit on generated tokens.")]
DEFAULT_MAX_NEW_TOKENS = 256  # the same as in Python
Temperature = Annotated[
    float, Option(min=0.0, help="Sampling temperature; 0: always the likeliest token.")
]
TopP = Annotated[
    float | None, Option(help="Sample from the likeliest tokens whose probabilities sum to this.")
]
TopK = Annotated[int | None, Option(min=1, help="Sample from the K likeliest tokens.")]
MinP = Annotated[
    float | None, Option(help="Minimum probability, as a fraction of the likeliest token's.")
]
RepetitionPenalty = Annotated[
    float, Option(help="Above 1: make tokens of the prompt and the reply less likely.")
]
PresencePenalty = Annotated[
    float, Option(help="Subtracted once from the logit of each token in the reply.")
]
FrequencyPenalty = Annotated[
    float, Option(help="Subtracted from a token's logit for each occurrence in the reply.")
]
Stop = Annotated[list[str] | None, Option(help="Text to stop before; may be repeated.")]
Seed = Annotated[int | None, Option(help="Seed of sampling; the same seed repeats a reply.")]
MaxContext = Annotated[
    int | None, Option(min=2, help="Limit on the tokens of prompt and reply together.")
]
Strategy = Annotated[str, Option(help="When to use a cache: always, disabled, long or adaptive.")]
Threshold = Annotated[int, Option(help="Number of tokens from which `long` uses a cache.")]
Budget = Annotated[str | None, Option(help="Limit on the bytes of an `adaptive` cache: 64MiB.")]
PrefillChunk = Annotated[int, Option(min=1, help="Tokens per prefill step.")]
Draft = Annotated[
    str | None, Option(help="Speculative decoding: ngram, or the name of a smaller model.")
]
Backend = Annotated[
    str | None, Option(help="Attention backend: native, triton, reference; default: the fastest.")
]
Pack = Annotated[bool, Option(help="Pack 16-bit weights for faster computation on a CPU.")]
Guard = Annotated[
    bool, Option(help="Test the format on the model, for at most 2 s, and warn if it does harm.")
]
Load = Annotated[Path | None, Option(help="Saved conversation to continue.")]
Store = Annotated[
    list[str] | None,
    Option(help="Folder or URL of a prefix store; may be repeated, nearest first."),
]
Device = Annotated[str | None, Option(help="cpu, cuda, cuda:1, mps; default: a CUDA GPU if any.")]
DType = Annotated[str, Option(help="float32, bfloat16, float16; auto: as in the checkpoint.")]
Stats = Annotated[bool, Option(help="Print speed and memory.")]
Json = Annotated[bool, Option(help="Print only one JSON object.")]


BACKENDS = ["native", "triton", "reference", "dequantize", "interpreted"]  # of kvant.attention


def merge_spec(kv_cache: str | None, window_size: int | None, num_sinks: int | None) -> str:
    """Merge the window flags into a spec; raise an error if it has the option already."""
    spec = "raw" if kv_cache is None else kv_cache
    spec_words = {word.strip().partition("=")[0] for word in spec.split(",")}
    for flag, option, value in (
        ("--kv-window-size", "window", window_size),
        ("--kv-window-keep", "sinks", num_sinks),
    ):
        if value is None:
            continue
        if option in spec_words:
            raise ValueError(
                f"{flag} {value} with --kv-cache {spec}, which has {option}= too: drop one"
            )
        spec += f",{option}={value}"
    if num_sinks is not None and window_size is None and "window" not in spec_words:
        raise ValueError(
            f"--kv-window-keep {num_sinks} without a window: give --kv-window-size too"
        )
    return spec


RowShape = tuple[int, int]  # number of key heads, head dimension


def check_readable(path: Path, flag: str) -> None:
    if not path.is_file():
        raise ValueError(f"{flag} {path}: there is no such file")


def check_writable(path: Path, flag: str) -> None:
    """Raise an error for an output file that cannot be created, before any work is done."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: the name of a file in an existing folder is needed")


def read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{flag} {path} cannot be read: it is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error.strerror}") from error


def check_text(text: str, source: str) -> str:
    """Return text, or raise an error if it has lone surrogates, which tokenizers reject.

    Python decodes invalid UTF-8 of arguments and standard input to lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{source} is not UTF-8 text") from None
    return text


def check_backend(name: str | None) -> None:
    """Raise an error for the name of an unknown backend, without importing torch."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend {name!r} is not one of {BACKENDS}")


def check_stores(names: list[str] | None) -> None:
    """Raise an error for an invalid name of a store, without importing torch."""
    from kvant.stores.open import check_name

    for name in names or ():
        check_name(name)


def check_send_options(send_options: Mapping[str, Any], max_context: int | None) -> None:
    """Raise an error for invalid sampling options or stop conditions."""
    from kvant.generation.settings import Sampling, StopConditions

    sampling = dict(send_options)
    stop = {"max_new_tokens": sampling.pop("max_new_tokens"), "stop": sampling.pop("stop")}
    Sampling(**sampling)
    StopConditions(**stop, max_context=max_context)


def check_transcript(path: Path, model: str | None) -> Transcript:
    """Read the transcript of a saved conversation, and compare its row shapes with the model's.

    Shapes are compared only if the model's configuration is a local file. Whether the weights are
    the same is checked after loading them.
    """
    check_readable(path, "--load")
    from kvant.cache.files import read_header
    from kvant.generation.conversation import Transcript

    head = read_header(path)
    transcript = Transcript.from_header(path, head.about)
    file_shapes, model_shapes = _read_row_shapes(head), _read_model_row_shapes(model)
    # The cache of a text of one token has no rows yet.
    if model_shapes is not None and file_shapes and file_shapes != model_shapes:
        raise CacheFileError(
            f"--load {path}: a conversation with another model: the file has "
            f"{_format_row_shapes(file_shapes)}, --model has {_format_row_shapes(model_shapes)}"
        )
    return transcript


def _read_row_shapes(head: CacheFileHeader) -> list[RowShape]:
    """Return the row shapes of the layers that store rows, from the header of a file."""
    return [
        (head.count_key_heads(name), tensor.shape[2])
        for index in range(len(head.spec.layers))
        for name, tensor in head.tensors.items()
        if name.startswith(f"{index}/") and name.endswith("keys.open")
    ]


def _read_model_row_shapes(model: str | None) -> list[RowShape] | None:
    """Return the row shapes of a model from its local config.json, None if that is not enough."""
    from kvant.checkpoints import find_config_file
    from kvant.models import layer_shapes

    file = find_config_file(model)
    try:
        config = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        layers = None if config is None else layer_shapes(config)
    except (CacheError, OSError, ValueError):  # loading the model reports the error, or succeeds
        return None
    if layers is None:
        return None
    return [(layer.num_heads, layer.key_dim) for layer in layers if layer.attends]


def _format_row_shapes(shapes: Iterable[RowShape]) -> str:
    """Format row shapes by count: 28 layers of 8 heads of 128."""
    counts = Counter(shapes)
    parts = [f"{count} layers of {heads} heads of {dim}" for (heads, dim), count in counts.items()]
    return " and ".join(parts) or "no rows"
