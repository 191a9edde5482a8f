"""Other libraries that run the same model on the same tokens, where they are installed.

A peer that cannot run says why in a line and is left out. Each steps a token at a time, as ours
does, on the device and with the threads that it takes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel

from kvant.bench.candidates import Make, dynamic

TRANSFORMERS = "transformers"


class Absent(Exception):
    """Why a peer is left out."""


class Mlx:
    """A model and a cache of mlx-lm."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = import_module("mlx_lm.models.cache").make_prompt_cache(model)
        self._mx = import_module("mlx.core")

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.cache)

    def feed(self, tokens: Sequence[int]) -> int:
        if len(tokens) > 1:  # their way with a prompt: no logits of its beginning are computed
            self.model(self._mx.array([list(tokens[:-1])]), cache=self.cache)
            self._mx.eval([layer.state for layer in self.cache])
        logits = self.model(self._mx.array([[tokens[-1]]]), cache=self.cache)[0, -1]
        return int(self._mx.argmax(logits).item())


def transformers(model: PreTrainedModel, where: str) -> Make:
    return dynamic(model)


def mlx_lm(model: PreTrainedModel, where: str) -> Make:
    if find_spec("mlx_lm") is None:
        raise Absent("mlx-lm is not installed")
    try:
        theirs = import_module("mlx_lm").load(where)[0]
    except ImportError as error:
        raise Absent(f"mlx-lm does not run on this machine: {_line(error)}") from error
    except (OSError, ValueError) as error:
        raise Absent(f"mlx-lm cannot load this model: {_line(error)}") from error
    return lambda: Mlx(theirs)


def llama_cpp(model: PreTrainedModel, where: str) -> Make:
    """Never runs: its files are of a kind of their own, and making one is no benchmark's work."""
    if find_spec("llama_cpp") is None:
        raise Absent("llama-cpp-python is not installed")
    raise Absent("llama-cpp-python reads GGUF files, and this model is not one")


PEERS: dict[str, Callable[[PreTrainedModel, str], Make]] = {
    TRANSFORMERS: transformers,
    "llama-cpp": llama_cpp,
    "mlx-lm": mlx_lm,
}


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--against {name}: known are {', '.join(PEERS)}")


def present(
    names: Sequence[str], model: PreTrainedModel, where: str
) -> tuple[dict[str, Make], list[str]]:
    """The peers that can run the model at `where`, and a line for each that cannot."""
    makes, skipped = {}, []
    for name in names:
        try:
            makes[name] = PEERS[name](model, where)
        except Absent as reason:
            skipped.append(str(reason))
    return makes, skipped


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
