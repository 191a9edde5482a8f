"""Ways to generate, each a function from a player to the tokens it generates.

A player is a model with its cache, so a mode runs with the transformers cache and with kvant's, and
the tokens must be equal.
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
from hf.parity import (
    PROMPT,
    Batch,
    Text,
    generate_text,
    make_transformers_cache,
    model_of,
    prepare_model,
    text_of,
)
from hf.zoo import FAMILIES, Family
from kvant.recipes import LayerSpec

# owner of the cache; kvant's is used with a stock or an attached model
Owner = Literal["host", "stock", "attached"]
LONG_DRAFT = 20  # more tokens than the default slack, or a window of the zoo


@dataclass(frozen=True, eq=False)
class Player:
    """A model, and the cache that it generates with."""

    model: PreTrainedModel
    family: Family
    owner: Owner
    spec: str | LayerSpec = "raw"

    def cache(self) -> Cache:
        if self.owner == "host":
            return make_transformers_cache(self.model, self.family)
        return kvant.cache_for(self.model, self.spec)

    def text(self, batch: Batch = 1) -> Text:
        return text_of(self.family, batch).prompt

    def play(self, text: Text | None = None, cache: Cache | None = None, **options: Any) -> Tensor:
        """Generate; an attached model creates its cache unless it gets one."""
        if cache is None and self.owner != "attached":
            cache = self.cache()
        return generate_text(self.model, self.family, text or self.text(), cache, **options)


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
    return player.play(
        make_repetitive(player.text()), prompt_lookup_num_tokens=3, max_new_tokens=16
    )


def assisted(player: Player) -> Tensor:
    return player.play(assistant_model=make_draft(player.family.name), max_new_tokens=16)


def assisted_far(player: Player) -> Tensor:
    """Use drafts longer than the default slack."""
    model = make_draft(player.family.name, LONG_DRAFT)
    return player.play(assistant_model=model, max_new_tokens=LONG_DRAFT + 4)


def assisted_by_ours(player: Player) -> Tensor:
    """Use a kvant cache for the draft model, too."""
    with prepare_model(make_draft(player.family.name), player.owner, player.spec) as model:
        return player.play(assistant_model=model, max_new_tokens=16)


def several_turns(player: Player) -> Tensor:
    cache, text = player.cache(), player.text()
    for turn in range(3):
        text = _more(text, player.play(text, cache, max_new_tokens=6), turn)
    return text.ids


def forks(player: Player) -> Tensor:
    """Continue one prefix twice; the first continues after the second has finished."""
    cache, text = player.cache(), player.text()
    before = player.play(text, cache, max_new_tokens=5)
    fork = copy.deepcopy(cache)
    first = player.play(_more(text, before, 1), cache, max_new_tokens=5)
    second = player.play(_more(text, before, 2), fork, max_new_tokens=5)
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


def play_mode(mode: str, name: str, owner: Owner, spec: str | LayerSpec = "raw") -> Tensor:
    model = model_of(name, "eager" if owner == "host" else None)
    with prepare_model(model, owner, spec) as model:
        return MODES[mode](Player(model, FAMILIES[name], owner, spec))


@lru_cache(maxsize=4)
def make_draft(name: str, tokens: int = 5) -> PreTrainedModel:
    """Return a draft model that is often right and often wrong."""
    model = copy.deepcopy(model_of(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2 * float(weight.std()))
    config = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = tokens, "constant"
    config.assistant_confidence_threshold = 0.0
    return model


def make_repetitive(text: Text) -> Text:
    """Return a repetitive prompt, so that prompt lookup matches."""
    phrase = text.ids[:, : PROMPT // 3]
    return Text(phrase.repeat(1, 3), text.mask, text.encoder)


def _more(text: Text, played: Tensor, seed: int) -> Text:
    """Append the reply and the next message."""
    generator = torch.Generator().manual_seed(seed)
    message = torch.randint(3, 128, (played.shape[0], 3), generator=generator)
    return Text(torch.cat([played, message], 1), None, text.encoder)
