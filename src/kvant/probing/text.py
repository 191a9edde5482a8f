"""The tokens that a model is probed with: a text for its tokenizer, or tokens that mean nothing.

The usual text is source code that the model inside was not trained on: a text that a model knows
by heart shows less damage than any other. `kvant eval` measures on other files than these.

A model is less sure behind tokens that mean nothing, and any change shows ten times as large there
(5 to 11 times for formats that do little to the model inside): so is what is tolerated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.configurations import max_context
from kvant.demo.texts import probed

TOKENS = 1024  # read; the last ones are judged by
LETTERS = 8  # of a text for a token: no tokenizer packs source code so densely
FEWEST = 256  # in fewer, all rows of a format with a dense tail are dense
MAX_KL = 5e-3  # nats, in the mean: about one percent of perplexity
MEANINGLESS = 10.0  # times as much: what was seen is said above


@dataclass(frozen=True)
class Trial:
    """Tokens [1, n], and the mean divergence that is tolerated on them."""

    ids: Tensor
    max_kl: float


def trial(
    model: PreTrainedModel, tokenizer: Any = None, text: str | None = None, max_kl: float = MAX_KL
) -> Trial:
    """The first tokens of a text (of files of the standard library, if none is given)."""
    count = min(TOKENS, max_context(model.config) or TOKENS)
    usual = probed() if text is None and tokenizer is not None else []
    if tokenizer is None or (text is None and not usual):  # nor has every Python its sources
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (1, count), generator=generator, device="cpu")
        return Trial(ids.to(model.device), max_kl * MEANINGLESS)
    told = "\n".join(reversed(usual))[: LETTERS * TOKENS] if text is None else text
    found = [int(token) for token in tokenizer.encode(told)[:count]]
    if len(found) < min(FEWEST, count):
        raise ValueError(
            f"a text of {len(found)} tokens shows too little: {min(FEWEST, count)} or more"
        )
    return Trial(torch.tensor([found], device=model.device), max_kl)
