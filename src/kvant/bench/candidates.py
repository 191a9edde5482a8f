"""Ways to continue one sequence, which a benchmark compares.

No cache, a format, the host's cache; and other libraries that run the same model on the same
tokens, where they are installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from kvant.hf import cache_for, cache_name

NONE = "none"  # no cache: everything is computed anew for every token


class Candidate(Protocol):
    """One sequence, at first empty."""

    @property
    def nbytes(self) -> int:
        """What the tokens are remembered in."""

    def feed(self, tokens: Sequence[int]) -> int:
        """Read `tokens` after those before; the likeliest next."""


Make = Callable[[], Candidate]


class Recomputed:
    """No memory but the tokens themselves."""

    nbytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> int:
        self._tokens += tokens
        return likeliest(self.model, self._tokens, use_cache=False)


class Remembered:
    """A cache that the model writes to and reads."""

    def __init__(self, model: PreTrainedModel, cache: Any, size: Callable[[Any], int]) -> None:
        self.model = model
        self.cache = cache
        self._given = {cache_name(model): cache}
        self._size = size

    @property
    def nbytes(self) -> int:
        return self._size(self.cache)

    def feed(self, tokens: Sequence[int]) -> int:
        return likeliest(self.model, tokens, **self._given)


@torch.no_grad()
def likeliest(model: PreTrainedModel, tokens: Sequence[int], **how: Any) -> int:
    """The token that the model finds likeliest; logits of the others' places are not computed."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return int(model(input_ids=ids, logits_to_keep=1, **how).logits[0, -1].argmax())


def dynamic(model: PreTrainedModel) -> Make:
    """The host's own cache."""
    return lambda: Remembered(model, DynamicCache(config=model.config), _dynamic_nbytes)


def ours(model: PreTrainedModel, names: Sequence[str]) -> dict[str, Make]:
    """Formats of the spec language, and "none"; one that the model cannot have is refused now."""
    takes = inspect.signature(model.forward).parameters
    for name in (cache_name(model), "logits_to_keep"):
        if name not in takes:
            raise ValueError(f"{type(model).__name__} takes no {name}: it cannot be measured so")
    return {name: _make(model, name) for name in names}


def _make(model: PreTrainedModel, name: str) -> Make:
    if name == NONE:
        return lambda: Recomputed(model)
    cache_for(model, name)
    return lambda: Remembered(model, cache_for(model, name), _our_nbytes)


def _our_nbytes(cache: Any) -> int:
    return int(cache.states.nbytes)


def _dynamic_nbytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


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
