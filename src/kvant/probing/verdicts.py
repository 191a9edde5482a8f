"""Verdicts on disk: what was found out of a model and a format is not tried again.

A key is of all weights, the configuration, the format, the text and the version of the trial. A
weight enters by at most 1 MiB of its bytes, spread evenly over it: training changes all values of a
weight, and a key of 14 GiB still costs tenths of a second. Any fault in reading or writing a file
is a verdict that is not there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import make_comparable, named_attributes, named_modules
from kvant.weights import named_weights

EDITION = "kvant verdict 2"  # another one where trials find another thing
MAX_FILES = 256
SLICES, SLICE = 256, 4096  # of the bytes of a weight, and bytes of each

T = TypeVar("T")

log = logging.getLogger("kvant")


def folder() -> Path:
    """$XDG_CACHE_HOME/kvant/verdicts, or ~/.cache/kvant/verdicts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "kvant" / "verdicts"


def key_of(model: PreTrainedModel, ids: Tensor, *parts: object) -> str | None:
    """The name of a verdict; None of a model that its weights do not tell."""
    if any(
        one.training or one._forward_hooks or one._forward_pre_hooks
        for _, one in named_modules(model)
    ) or any(tensor.is_meta for _, tensor in _tensors(model)):
        return None
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=repr)
    values = [(name, make_comparable(value)) for name, value in named_attributes(model)]
    told = (
        EDITION,
        version("kvant"),
        type(model).__qualname__,
        settings,
        values,
        model.device.type,
    )
    found = blake2b(repr((told, ids.tolist(), parts)).encode(), digest_size=32)
    for name, tensor in _tensors(model):
        found.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        found.update(sample(tensor))
    return found.hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from named_weights(model)
    yield from model.named_buffers()
    for name, value in named_attributes(model):
        if isinstance(value, Tensor):
            yield name, value


@torch.no_grad()
def sample(tensor: Tensor) -> bytes:
    """Return all bytes of a small tensor, and evenly spread slices of a large one."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) > SLICES * SLICE:
        begins = [at * (len(flat) - SLICE) // (SLICES - 1) for at in range(SLICES)]
        flat = torch.cat([flat[begin : begin + SLICE] for begin in begins])
    return flat.cpu().numpy().tobytes()


def load(key: str | None, parse: Callable[[Any], T]) -> T | None:
    """Read a verdict; None where there is no file that `parse` accepts."""
    if key is None:
        return None
    # No file, no JSON, no home; fields that are missing, of another type or out of range.
    with suppress(OSError, ValueError, RuntimeError, LookupError, TypeError):
        return parse(json.loads((folder() / f"{key}.json").read_text(encoding="utf-8")))
    return None


def store(key: str | None, verdict: dict[str, Any]) -> None:
    """Write it whole or not at all; the oldest beyond `MAX_FILES` go."""
    if key is None:
        return
    try:
        place = folder()
        place.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=place, suffix=".new", delete=False) as file:
            try:
                json.dump(verdict, file)
                file.close()
                os.replace(file.name, place / f"{key}.json")
            except BaseException:
                os.unlink(file.name)
                raise
        kept = sorted(place.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
        for one in kept[MAX_FILES:]:
            one.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        log.info("the verdict on a format is not kept: %s", error)
