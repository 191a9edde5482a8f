"""Candidates of a benchmark: ways to continue one sequence.

They are no cache, a cache of any spec, transformers' DynamicCache, and mlx-lm, if installed, that
runs the same model on the same tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvant.bench import report
from kvant.bench.clock import BenchDevice
from kvant.checkpoints import load
from kvant.hf import cache_for, get_cache_argument

NO_CACHE = "none"  # recompute the whole sequence for every token
TRANSFORMERS, MLX = PEERS = ("transformers", "mlx-lm")
TEXT_MODULE = "argparse"  # a long module of the standard library, whose source is the text


@dataclass(frozen=True)
class Candidate:
    """A sequence, initially empty, that tokens are fed to."""

    feed: Callable[[Sequence[int]], int]  # append tokens; return the most likely next one
    measure_nbytes: Callable[[], int]  # of the cache


MakeCandidate = Callable[[], Candidate]


def open_checkpoint(
    name: str | None, device: BenchDevice, dtype: str, count: int
) -> tuple[PreTrainedModel, list[int], dict[str, Any]]:
    """Load a model; return it, the first `count` tokens of a text, and the model's facts."""
    report.show_progress("loading the model")
    model, tokenizer = load(name, device=device.name, dtype=dtype)
    facts = {
        "model": name or "the model inside",
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "transformers": version("transformers"),
    }
    return model, read_text_tokens(model, tokenizer, count), facts


def read_text_tokens(model: Any, tokenizer: Any, count: int) -> list[int]:
    """Return the first `count` tokens of a text; raise if it or the context is shorter."""
    max_positions = getattr(
        model.config.get_text_config(decoder=True), "max_position_embeddings", None
    )
    tokens: list[int] = tokenizer.encode(inspect.getsource(import_module(TEXT_MODULE)))
    for limit, source in ((max_positions, "the context of the model"), (len(tokens), "the text")):
        if limit is not None and count > limit:
            raise ValueError(
                f"{count} tokens, and {source} has {limit}: shorten --lengths, --prompt"
            )
    return tokens[:count]


@torch.no_grad()
def find_likeliest_token(model: PreTrainedModel, tokens: Sequence[int], **options: Any) -> int:
    """Return the most likely next token; compute the logits of the last position only."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return int(model(input_ids=ids, logits_to_keep=1, **options).logits[0, -1].argmax())


def make_candidates(model: PreTrainedModel, names: Sequence[str]) -> dict[str, MakeCandidate]:
    """Return factories by spec, and for "none"; raise if the model does not support one."""
    parameters = inspect.signature(model.forward).parameters
    for name in (get_cache_argument(model), "logits_to_keep"):
        if name not in parameters:
            raise ValueError(f"{type(model).__name__} takes no {name}: it cannot be measured")
    return {name: _make_candidate(model, name) for name in names}


def _make_candidate(model: PreTrainedModel, name: str) -> MakeCandidate:
    if name == NO_CACHE:
        return lambda: make_uncached(model)
    cache_for(model, name)
    return lambda: make_cached(model, cache_for(model, name), lambda c: c.states.nbytes)


def make_uncached(model: PreTrainedModel) -> Candidate:
    """Make a sequence that is recomputed for every token."""
    fed: list[int] = []

    def feed(tokens: Sequence[int]) -> int:
        fed.extend(tokens)
        return find_likeliest_token(model, fed, use_cache=False)

    return Candidate(feed, lambda: 0)


def make_cached(
    model: PreTrainedModel, cache: Any, measure_nbytes: Callable[[Any], int]
) -> Candidate:
    """Make a sequence with a cache that the model's forward updates."""
    feed = partial(find_likeliest_token, model, **{get_cache_argument(model): cache})
    return Candidate(feed, lambda: measure_nbytes(cache))


def make_dynamic(model: PreTrainedModel) -> MakeCandidate:
    """Return a factory of sequences with transformers' DynamicCache."""

    def measure_nbytes(cache: DynamicCache) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    return lambda: make_cached(model, DynamicCache(config=model.config), measure_nbytes)


def make_mlx(model: Any) -> Candidate:
    """Make a sequence in mlx-lm, with its model and cache."""
    cache = import_module("mlx_lm.models.cache").make_prompt_cache(model)
    mx = import_module("mlx.core")

    def feed(tokens: Sequence[int]) -> int:
        if len(tokens) > 1:  # as mlx-lm prefills a prompt: without logits
            model(mx.array([list(tokens[:-1])]), cache=cache)
            mx.eval([layer.state for layer in cache])
        return int(mx.argmax(model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]).item())

    return Candidate(feed, lambda: sum(layer.nbytes for layer in cache))


def make_peers(
    names: Sequence[str], model: PreTrainedModel, path: str
) -> tuple[dict[str, MakeCandidate], list[str]]:
    """Return the peers that can run the model at `path`, and a line for each skipped one."""
    makes, skipped = {}, []
    if TRANSFORMERS in names:
        makes[TRANSFORMERS] = make_dynamic(model)
    if MLX in names and find_spec("mlx_lm") is None:
        skipped.append("mlx-lm is not installed")
    elif MLX in names:
        try:
            makes[MLX] = partial(make_mlx, import_module("mlx_lm").load(path)[0])
        except (ImportError, OSError, ValueError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            skipped.append(f"mlx-lm cannot run this model here: {reason}")
    return makes, skipped
