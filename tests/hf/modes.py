"""The ways in which people generate, each as a function from a player to the tokens it played.

A player is a model with the cache that it is to use, so one mode runs with the host's cache and
with ours, and the tokens must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

import kvant
from hf.parity import PROMPT, Batch, Text, generated, handed, host_cache, model_of, text_of
from hf.zoo import FAMILIES, Family
from kvant.recipes import LayerSpec

Owner = Literal["host", "stock", "attached"]  # whose cache; ours goes to a stock model or attached
LONG_DRAFT = 20  # more tokens than a rewind is exact by default, or a window of the zoo holds


@dataclass(frozen=True, eq=False)
class Player:
    """A model, and the cache that it generates with."""

    model: PreTrainedModel
    family: Family
    owner: Owner
    spec: str | LayerSpec = "raw"

    def cache(self) -> Cache:
        if self.owner == "host":
            return host_cache(self.model, self.family)
        return kvant.cache_for(self.model, self.spec)

    def text(self, batch: Batch = 1) -> Text:
        return text_of(self.family, batch).prompt

    def play(self, text: Text | None = None, cache: Cache | None = None, **options: Any) -> Tensor:
        """An attached model makes its cache by itself, unless it is given one."""
        if cache is None and self.owner != "attached":
            cache = self.cache()
        return generated(self.model, self.family, text or self.text(), cache, **options)


def greedy(player: Player) -> Tensor:
    return player.play()


def sampling(player: Player) -> Tensor:
    torch.manual_seed(7)
    return player.play(do_sample=True, top_k=20)


def beams(player: Player) -> Tensor:
    return player.play(num_beams=3, length_penalty=0.0)


def several_sequences(player: Player) -> Tensor:
    torch.manual_seed(8)
    return player.play(do_sample=True, num_return_sequences=2)


def left_padded(player: Player) -> Tensor:
    return player.play(player.text(2))


def left_padded_beams(player: Player) -> Tensor:
    return player.play(player.text(2), num_beams=2)


def chunked_prompt(player: Player) -> Tensor:
    return player.play(prefill_chunk_size=5)


def prompt_lookup(player: Player) -> Tensor:
    return player.play(repetitive(player.text()), prompt_lookup_num_tokens=3, max_new_tokens=16)


def assisted(player: Player) -> Tensor:
    return player.play(assistant_model=draft(player.family.name), max_new_tokens=16)


def assisted_far(player: Player) -> Tensor:
    """With drafts that no default promises to take back."""
    model = draft(player.family.name, LONG_DRAFT)
    return player.play(assistant_model=model, max_new_tokens=LONG_DRAFT + 4)


def assisted_by_ours(player: Player) -> Tensor:
    """The draft's cache is one of ours too."""
    with handed(draft(player.family.name), player.owner, player.spec) as model:
        return player.play(assistant_model=model, max_new_tokens=16)


def several_turns(player: Player) -> Tensor:
    cache, text = player.cache(), player.text()
    for turn in range(3):
        text = _more(text, player.play(text, cache, max_new_tokens=6), turn)
    return text.ids


def forks(player: Player) -> Tensor:
    """Two continuations of one prefix; the first goes on where it was, after the second."""
    cache, text = player.cache(), player.text()
    before = player.play(text, cache, max_new_tokens=5)
    twin = copy.deepcopy(cache)
    first = player.play(_more(text, before, 1), cache, max_new_tokens=5)
    second = player.play(_more(text, before, 2), twin, max_new_tokens=5)
    third = player.play(_more(text, first, 3), cache, max_new_tokens=5)
    return torch.cat([first, second, third], 1)


def in_and_out_of_inference_mode(player: Player) -> Tensor:
    cache, text = player.cache(), player.text()
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            text = _more(text, player.play(text, cache, max_new_tokens=4), 0)
    return text.ids.clone()


MODES: Mapping[str, Callable[[Player], Tensor]] = {
    mode.__name__.replace("_", " "): mode
    for mode in (
        greedy,
        sampling,
        beams,
        several_sequences,
        left_padded,
        left_padded_beams,
        chunked_prompt,
        prompt_lookup,
        assisted,
        assisted_far,
        assisted_by_ours,
        several_turns,
        forks,
        in_and_out_of_inference_mode,
    )
}


def played(mode: str, name: str, owner: Owner, spec: str | LayerSpec = "raw") -> Tensor:
    model = model_of(name, "eager" if owner == "host" else None)
    with handed(model, owner, spec) as model:
        return MODES[mode](Player(model, FAMILIES[name], owner, spec))


@lru_cache(maxsize=4)
def draft(name: str, tokens: int = 5) -> PreTrainedModel:
    """A model that often guesses what the family says, and often not."""
    model = copy.deepcopy(model_of(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2 * float(weight.std()))
    config = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = tokens, "constant"
    config.assistant_confidence_threshold = 0.0
    return model


def repetitive(text: Text) -> Text:
    """A prompt that speaks in phrases: something to look up."""
    phrase = text.ids[:, : PROMPT // 3]
    return Text(phrase.repeat(1, 3), text.mask, text.encoder)


def _more(text: Text, played: Tensor, seed: int) -> Text:
    """What was said, and what the next speaker says."""
    generator = torch.Generator().manual_seed(seed)
    said = torch.randint(3, 128, (played.shape[0], 3), generator=generator)
    return Text(torch.cat([played, said], 1), None, text.encoder)
