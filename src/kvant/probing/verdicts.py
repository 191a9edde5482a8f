"""Store verdicts on disk, so that no format is tried on a model twice.

A key hashes all weights, the configuration, the format, the text and the version of the trial. At
most 1 MiB of each weight is hashed, spread evenly over it: training changes all values of a weight,
and a key of 14 GiB still takes only tenths of a second. If a file cannot be read or written, there
is no verdict.
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
from kvant.weights.packing import named_weights

KEY_VERSION = "kvant verdict 2"  # change it if trials give other results
MAX_FILES = 256
NUM_SLICES, SLICE_NBYTES = 256, 4096  # of a weight, that are hashed

T = TypeVar("T")

log = logging.getLogger("kvant")


def get_folder() -> Path:
    """Return $XDG_CACHE_HOME/kvant/verdicts, or ~/.cache/kvant/verdicts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "kvant" / "verdicts"


def make_key(model: PreTrainedModel, ids: Tensor, *parts: object) -> str | None:
    """Make the key of a verdict; None if more than weights determines the model's output."""
    if any(
        module.training or module._forward_hooks or module._forward_pre_hooks
        for _, module in named_modules(model)
    ) or any(tensor.is_meta for _, tensor in _iterate_tensors(model)):
        return None
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=repr)
    attributes = [(name, make_comparable(value)) for name, value in named_attributes(model)]
    identity = (
        KEY_VERSION,
        version("kvant"),
        type(model).__qualname__,
        settings,
        attributes,
        model.device.type,
    )
    digest = blake2b(repr((identity, ids.tolist(), parts)).encode(), digest_size=32)
    for name, tensor in _iterate_tensors(model):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sample_bytes(tensor))
    return digest.hexdigest()


def _iterate_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from named_weights(model)
    yield from model.named_buffers()
    for name, value in named_attributes(model):
        if isinstance(value, Tensor):
            yield name, value


@torch.no_grad()
def sample_bytes(tensor: Tensor) -> bytes:
    """Return all bytes of a small tensor, and evenly spread slices of a large one."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) > NUM_SLICES * SLICE_NBYTES:
        begins = [
            index * (len(flat) - SLICE_NBYTES) // (NUM_SLICES - 1) for index in range(NUM_SLICES)
        ]
        flat = torch.cat([flat[begin : begin + SLICE_NBYTES] for begin in begins])
    return flat.cpu().numpy().tobytes()


def load(key: str | None, parse: Callable[[Any], T]) -> T | None:
    """Load a verdict; return None if there is no file that `parse` accepts."""
    if key is None:
        return None
    # Missing file or home folder, invalid JSON, fields missing, of another type or out of range.
    with suppress(OSError, ValueError, RuntimeError, LookupError, TypeError):
        return parse(json.loads((get_folder() / f"{key}.json").read_text(encoding="utf-8")))
    return None


def store(key: str | None, verdict: dict[str, Any]) -> None:
    """Write a verdict atomically; delete the oldest files beyond `MAX_FILES`."""
    if key is None:
        return
    try:
        folder = get_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder, suffix=".new", delete=False) as file:
            try:
                json.dump(verdict, file)
                file.close()
                os.replace(file.name, folder / f"{key}.json")
            except BaseException:
                os.unlink(file.name)
                raise
        files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[MAX_FILES:]:
            path.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        log.info("the verdict on a format could not be stored: %s", error)
