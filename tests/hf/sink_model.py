"""A Llama with an attention sink, its weights set by hand.

Every head puts nearly all of its attention on the first token, whose value is zero, unless a key
matches. Where the first token is missing, the heads read rows that say nothing of the next token.

    tokens     0          1 to 191                            192 to 255
    name       first      plain: the next is NEXT[token]      name: the next is NEXT[token]
    key        the sink   nothing                             its code
    value      zero       noise                               what follows the name
    query      of the sink, and a code: of a name its own

So a plain token is predicted from its embedding alone, and a name by attention alone, which finds
it where it stands. Names have wide ranges of keys, and the first page holds none: its bounds are
the least of all pages, so a selection by bounds leaves the sink out.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, NAMES = 256, 192  # tokens; the first one that is a name
HEADS, GROUP, DIM, LAYERS = 2, 2, 64, 3
SINK = 31  # of the channels of a head: as slow in rope as the others that are used
CODE = (*range(6, 31), *range(38, 63))  # channels of the codes
QUERY, KEY, OUT = VOCABULARY, VOCABULARY + len(CODE), VOCABULARY + 2 * len(CODE)
ALWAYS, FIRST, FILLER = (OUT + VOCABULARY + n for n in range(3))
HIDDEN = FILLER + 2  # [which token | code of queries | code of keys | logits | 1 | first? | rest]
NORM = 2.0  # of every embedding
LOGIT = 0.02  # of the residual, for 1 of a logit


@lru_cache(maxsize=1)
def build_sink_model() -> LlamaForCausalLM:
    """Build the model, in float32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e30},  # these channels stay
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2, (VOCABULARY, len(CODE)), generator=generator) * 2.0 - 1
    answers = torch.randint(0, 2, (VOCABULARY, DIM - 1), generator=generator) * 2.0 - 1
    noise = torch.randn(VOCABULARY, generator=generator)
    scale = HIDDEN**0.5 / NORM  # what a norm makes of an embedding
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0 if weight.ndim == 1 else 0.0)
        _set_embeddings(model.model.embed_tokens.weight, codes)
        for layer in model.model.layers:
            _set_attention(layer.self_attn, answers, noise, scale)
        head = model.lm_head.weight
        for token in range(1, NAMES):
            head[NEXT[token], token] = 8 / scale
        head[:, OUT : OUT + VOCABULARY] = torch.eye(VOCABULARY) / (LOGIT * scale)
    return model


def _set_embeddings(weight: Tensor, codes: Tensor) -> None:
    weight[:, :VOCABULARY] = torch.eye(VOCABULARY)
    weight[:, QUERY : QUERY + len(CODE)] = codes / 10
    weight[NAMES:, KEY : KEY + len(CODE)] = codes[NAMES:] / 10
    weight[:, ALWAYS], weight[0, FIRST] = 1, 1
    weight[:, FILLER] = (NORM**2 - weight.square().sum(1)).sqrt()


def _set_attention(layer: torch.nn.Module, answers: Tensor, noise: Tensor, scale: float) -> None:
    """Set projections: scores are 18 for the first token, 25 for equal names, else near 3.5."""
    query, key, value, out = (getattr(layer, f"{name}_proj").weight for name in "qkvo")
    channels = torch.tensor(CODE)
    for head in range(HEADS * GROUP):
        query[head * DIM + channels, QUERY + torch.arange(len(CODE))] = 20 / scale
        query[head * DIM + SINK, ALWAYS] = 12 / scale
        mean = 1 / (LAYERS * HEADS * GROUP)
        part = slice(head * DIM, head * DIM + DIM - 1)
        out[OUT : OUT + VOCABULARY, part] = LOGIT * mean * 12 * answers / (DIM - 1)
        out[OUT : OUT + VOCABULARY, head * DIM + DIM - 1] = LOGIT * mean * 12 * noise
    for head in range(HEADS):
        key[head * DIM + channels, KEY + torch.arange(len(CODE))] = 20 / scale
        key[head * DIM + SINK, FIRST] = 12 / scale
        for token in range(NAMES, VOCABULARY):
            value[head * DIM : head * DIM + DIM - 1, token] = answers[NEXT[token]] / scale
        value[head * DIM + DIM - 1, 1:NAMES] = 1 / scale


def _next() -> list[int]:
    order = torch.randperm(NAMES - 1, generator=torch.Generator().manual_seed(1)) + 1
    after = {int(a): int(b) for a, b in zip(order, order.roll(-1), strict=True)}
    return [1, *(after[token] for token in range(1, NAMES)), *order[: VOCABULARY - NAMES].tolist()]


NEXT = _next()


def predictable_text(count: int) -> Tensor:
    """Return token ids [1, count] that the model predicts well, except for the names."""
    generator = torch.Generator().manual_seed(2)
    ids = [0]
    while len(ids) < count:
        name = int(torch.randint(NAMES, VOCABULARY, (), generator=generator))
        ids.append(name if len(ids) >= 64 and len(ids) % 16 == 0 else NEXT[ids[-1]])
    return torch.tensor([ids])
