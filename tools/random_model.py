"""Write a model of Qwen3-0.6B's shape with random weights, to compare servers with.

`python tools/random_model.py MODEL` writes a folder that transformers loads; `--gguf FILE` also
writes the weights for llama.cpp, in f16 (`pip install gguf`). Every token is a word or a byte, so
each text that the model generates is encoded as the same tokens again.
"""

from __future__ import annotations

import argparse
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvant.bench.cache_race import MODEL_SHAPES, build_model
from kvant.bench.harness import show_progress
from kvant.bench.serve import WORDS

END, SPACE = "<|endoftext|>", "Ġ"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


def make_vocabulary(size: int) -> list[str]:
    """Make `size` tokens: bytes, the words of benchmarks, and others with a leading space."""
    base = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS, *(SPACE + w for w in WORDS)]
    others = (SPACE + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    unique = dict.fromkeys([*base, *islice(others, size)])
    return [*islice(unique, size - 1), END]


def make_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer that encodes words as one token and other text as bytes."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(SPACE, WORDS[0])], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def write_gguf(path: Path, model: Any, tokens: list[str]) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")  # it also encodes known words as one token
    writer.add_token_list(tokens)
    token_type = gguf.TokenType
    writer.add_token_types([token_type.NORMAL] * (len(tokens) - 1) + [token_type.CONTROL])
    writer.add_token_merges([f"{SPACE} {WORDS[0]}"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, weight in model.named_parameters():
        dtype = torch.float32 if weight.ndim == 1 else torch.float16
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(gguf_name, weight.detach().to(dtype).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="Folder to write")
    parser.add_argument("--gguf", type=Path, help="File to write for llama.cpp")
    options = parser.parse_args()
    show_progress("drawing weights")
    model = build_model(dict(MODEL_SHAPES["0.6b"]))
    tokens = make_vocabulary(model.config.vocab_size)
    model.config.eos_token_id = model.generation_config.eos_token_id = len(tokens) - 1
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    show_progress("writing")
    model.save_pretrained(options.model)
    make_tokenizer(tokens).save_pretrained(options.model)
    if options.gguf is not None:
        write_gguf(options.gguf, model, tokens)
    show_progress("")


if __name__ == "__main__":
    main()
