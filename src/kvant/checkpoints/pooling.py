"""How a checkpoint makes one embedding of the hidden states of a text, read from its files.

A folder declares it as sentence-transformers does, a GGUF file as llama.cpp does:

    modules.json              Transformer, Pooling, and perhaps Normalize
    1_Pooling/config.json     the mode, such as pooling_mode_lasttoken
    <architecture>.pooling_type
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvant.gguf.file import read_header

PoolingMethod = Literal["mean", "last"]

MODULES_NAME, CONFIG_NAME = "modules.json", "config.json"
TEXT_CONFIG_NAME = "sentence_bert_config.json"
MODULE_PREFIX = "sentence_transformers."  # other modules have code of their own
MODULES = ["Transformer", "Pooling", "Normalize"]  # the last one may be missing
MODE_PREFIX = "pooling_mode_"
MODES: Mapping[str, PoolingMethod] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
GGUF_KEY = "pooling_type"
GGUF_TYPES = ("none", "mean", "cls", "last", "rank")  # llama.cpp's enumeration
BIDIRECTIONAL_MESSAGE = (
    "bidirectional attention cannot use a KV cache: compute embeddings with sentence-transformers"
)
UNDECLARED_MESSAGE = (
    "this model declares no pooling: embeddings need modules.json and the config of its Pooling "
    f"(a hub name: hf download NAME), or {GGUF_KEY} in a GGUF file"
)


class PoolingError(ValueError):
    """The checkpoint declares no pooling, or an unsupported one."""


@dataclass(frozen=True)
class Pooling:
    """Which hidden states are pooled, and whether the embedding is L2-normalized."""

    method: PoolingMethod
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.method not in get_args(PoolingMethod):
            allowed = ", ".join(get_args(PoolingMethod))
            raise PoolingError(f"method={self.method!r}: allowed are {allowed}")


@dataclass(frozen=True)
class DeclaredPooling:
    """The pooling of a checkpoint, or the reason why it has none."""

    pooling: Pooling | None = None
    refusal: str = UNDECLARED_MESSAGE

    def require(self) -> Pooling:
        """Return the pooling; raise PoolingError if there is none."""
        if self.pooling is None:
            raise PoolingError(self.refusal)
        return self.pooling


def read_pooling(checkpoint: Path) -> Pooling:
    """Read the pooling of a folder or of a GGUF file; raise PoolingError if there is none."""
    return _read_folder(checkpoint) if checkpoint.is_dir() else _read_gguf(checkpoint)


def _read_gguf(file: Path) -> Pooling:
    number = read_header(file).get_setting(GGUF_KEY)
    if number is None:
        raise PoolingError(UNDECLARED_MESSAGE)
    name = dict(enumerate(GGUF_TYPES)).get(number, "unknown")
    if name not in get_args(PoolingMethod):
        raise PoolingError(_explain_unsupported(f"{GGUF_KEY} {number!r} ({name})"))
    return Pooling(name, normalize=True)  # type: ignore[arg-type]  # llama.cpp always normalizes


def _read_folder(folder: Path) -> Pooling:
    if not (folder / MODULES_NAME).is_file():
        raise PoolingError(UNDECLARED_MESSAGE)
    modules = _read_json(folder, MODULES_NAME)
    try:
        types = [str(module["type"]) for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (TypeError, KeyError) as error:
        raise PoolingError(
            f"{MODULES_NAME} is corrupt: a list of modules with type and path is needed"
        ) from error
    names = [name.rpartition(".")[2] for name in types if name.startswith(MODULE_PREFIX)]
    if len(names) < len(types) or names not in (MODULES, MODULES[:2]):
        listed, known = ", ".join(types) or "no modules", ", ".join(MODULES)
        raise PoolingError(f"{MODULES_NAME} lists {listed}: embeddings are computed for {known}")
    if not paths[1].strip(".") or Path(paths[1]).name != paths[1]:
        raise PoolingError(f"{MODULES_NAME}: path {paths[1]!r} is not a folder of the checkpoint")
    _check_text_options(folder)
    mode = _read_mode(folder, f"{paths[1]}/{CONFIG_NAME}")
    if mode not in MODES:
        raise PoolingError(_explain_unsupported(f"mode {mode}"))
    return Pooling(MODES[mode], normalize=MODULES[2] in names)


def _check_text_options(folder: Path) -> None:
    """Refuse a model whose texts are changed before they are encoded."""
    if (folder / TEXT_CONFIG_NAME).is_file():
        options = _read_json(folder, TEXT_CONFIG_NAME)
        if isinstance(options, dict) and options.get("do_lower_case"):
            raise PoolingError(f"{TEXT_CONFIG_NAME} has do_lower_case, which is not supported")


def _read_mode(folder: Path, name: str) -> str:
    """Return the one mode that the config of a Pooling module turns on."""
    config = _read_json(folder, name)
    if not isinstance(config, dict):
        raise PoolingError(f"{name} is corrupt: a JSON object is needed")
    if config.get("include_prompt") is False:
        raise PoolingError(f"{name} leaves out prompts (include_prompt), which is not supported")
    modes = [
        key.removeprefix(MODE_PREFIX)
        for key, value in config.items()
        if key.startswith(MODE_PREFIX) and value is True
    ]
    modes += [str(config["pooling_mode"])] if config.get("pooling_mode") is not None else []
    if len(modes) != 1:
        listed = ", ".join(modes) or "no mode"
        raise PoolingError(f"{name} turns on {listed}: exactly one is needed")
    mode: str = modes[0]
    return mode


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise PoolingError(f"{name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PoolingError(f"{name} is corrupt: it is not JSON") from error


def _explain_unsupported(mode: str) -> str:
    return f"this model's pooling is {mode}: embeddings are computed for mean and last token"
