"""A model with a fixed reply: every token determines the next one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = """\
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>
{% endfor %}
{%- for one in messages %}<|im_start|>{{ one.role }}
{{ one.content }}
{%- for call in one.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
END = "<|im_end|>"
CHARACTERS = [chr(code) for code in (10, *range(32, 127))]


def make_character_tokenizer(*pieces: str) -> Any:
    """Return a tokenizer in which every character is a token; it decodes these pieces as well."""
    words = dict.fromkeys([*CHARACTERS, *pieces])
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, additional_special_tokens=["<|im_start|>"]
    )


def make_speaker(*pieces: str) -> tuple[Any, Any]:
    """Return a model that replies to any messages with these pieces, a token each, and its
    tokenizer.
    """
    assert len(set(pieces)) == len(pieces)
    words, tokenizer = [*CHARACTERS, *pieces], make_character_tokenizer(*pieces)
    tokenizer.chat_template = TEMPLATE
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in (*words, END)}
    chain = [ids["\n"], *(ids[piece] for piece in pieces), ids[END]]
    return _make_chain_model(len(tokenizer), chain), tokenizer


def _make_chain_model(vocabulary: int, chain: list[int]) -> Any:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=chain[-1],
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        (layer,) = model.model.layers
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()  # so the output depends on the last token only
        embedding = model.model.embed_tokens.weight
        model.lm_head.weight.zero_()
        for now, after in pairwise(chain):
            model.lm_head.weight[after] = embedding[now] / embedding[now].norm()
    model.generation_config.eos_token_id = chain[-1]
    return model
