"""Candidates of a benchmark: ways to continue one sequence.

They are no cache, a cache of any spec, transformers' DynamicCache, and other libraries, if
installed, that run the same model on the same tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel

from kvant.hf import cache_for, get_cache_argument

NO_CACHE = "none"  # recompute the whole sequence for every token


class SequenceCacheCandidate(Protocol):
    """A sequence, initially empty, that tokens are fed to."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""

    def feed(self, tokens: Sequence[int]) -> int:
        """Append `tokens`; return the most likely next token."""


MakeCandidate = Callable[[], SequenceCacheCandidate]


class UncachedCandidate:
    """A sequence without a cache."""

    nbytes = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> int:
        self._tokens += tokens
        return find_likeliest_token(self.model, self._tokens, use_cache=False)


class CachedCandidate:
    """A sequence with a cache that the model's forward updates."""

    def __init__(
        self, model: PreTrainedModel, cache: Any, measure_nbytes: Callable[[Any], int]
    ) -> None:
        self.model = model
        self.cache = cache
        self._cache_argument = {get_cache_argument(model): cache}
        self._measure_nbytes = measure_nbytes

    @property
    def nbytes(self) -> int:
        return self._measure_nbytes(self.cache)

    def feed(self, tokens: Sequence[int]) -> int:
        return find_likeliest_token(self.model, tokens, **self._cache_argument)


@torch.no_grad()
def find_likeliest_token(model: PreTrainedModel, tokens: Sequence[int], **options: Any) -> int:
    """Return the most likely next token; compute the logits of the last position only."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return int(model(input_ids=ids, logits_to_keep=1, **options).logits[0, -1].argmax())


def make_dynamic(model: PreTrainedModel) -> MakeCandidate:
    """Return a factory of sequences with transformers' DynamicCache."""
    return lambda: CachedCandidate(model, DynamicCache(config=model.config), _measure_dynamic_cache)


def make_candidates(model: PreTrainedModel, names: Sequence[str]) -> dict[str, MakeCandidate]:
    """Return factories by spec, and for "none"; raise if the model does not support one."""
    parameters = inspect.signature(model.forward).parameters
    for name in (get_cache_argument(model), "logits_to_keep"):
        if name not in parameters:
            raise ValueError(f"{type(model).__name__} takes no {name}: it cannot be measured")
    return {name: _make_candidate(model, name) for name in names}


def _make_candidate(model: PreTrainedModel, name: str) -> MakeCandidate:
    if name == NO_CACHE:
        return lambda: UncachedCandidate(model)
    cache_for(model, name)
    return lambda: CachedCandidate(model, cache_for(model, name), _measure_kvant_cache)


def _measure_kvant_cache(cache: Any) -> int:
    return int(cache.states.nbytes)


def _measure_dynamic_cache(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


TRANSFORMERS = "transformers"


class PeerUnavailable(Exception):
    """Reason why a peer is skipped."""


class MlxCandidate:
    """A sequence in mlx-lm, with its model and cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = import_module("mlx_lm.models.cache").make_prompt_cache(model)
        self._mx = import_module("mlx.core")

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.cache)

    def feed(self, tokens: Sequence[int]) -> int:
        if len(tokens) > 1:  # as mlx-lm prefills a prompt: without logits
            self.model(self._mx.array([list(tokens[:-1])]), cache=self.cache)
            self._mx.eval([layer.state for layer in self.cache])
        logits = self.model(self._mx.array([[tokens[-1]]]), cache=self.cache)[0, -1]
        return int(self._mx.argmax(logits).item())


def make_transformers(model: PreTrainedModel, path: str) -> MakeCandidate:
    return make_dynamic(model)


def make_mlx_lm(model: PreTrainedModel, path: str) -> MakeCandidate:
    if find_spec("mlx_lm") is None:
        raise PeerUnavailable("mlx-lm is not installed")
    try:
        mlx_model = import_module("mlx_lm").load(path)[0]
    except ImportError as error:
        raise PeerUnavailable(
            f"mlx-lm does not run on this machine: {_first_line(error)}"
        ) from error
    except (OSError, ValueError) as error:
        raise PeerUnavailable(f"mlx-lm cannot load this model: {_first_line(error)}") from error
    return lambda: MlxCandidate(mlx_model)


def make_llama_cpp(model: PreTrainedModel, path: str) -> MakeCandidate:
    """Raise always: converting the model to a GGUF file is not a benchmark's task."""
    if find_spec("llama_cpp") is None:
        raise PeerUnavailable("llama-cpp-python is not installed")
    raise PeerUnavailable("llama-cpp-python reads GGUF files, and this model is not one")


PEERS: dict[str, Callable[[PreTrainedModel, str], MakeCandidate]] = {
    TRANSFORMERS: make_transformers,
    "llama-cpp": make_llama_cpp,
    "mlx-lm": make_mlx_lm,
}


def check_peers(names: Sequence[str]) -> None:
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--against {name}: known are {', '.join(PEERS)}")


def find_peers(
    names: Sequence[str], model: PreTrainedModel, path: str
) -> tuple[dict[str, MakeCandidate], list[str]]:
    """Return the peers that can run the model at `path`, and a line for each skipped one."""
    makes, skipped = {}, []
    for name in names:
        try:
            makes[name] = PEERS[name](model, path)
        except PeerUnavailable as reason:
            skipped.append(str(reason))
    return makes, skipped


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
