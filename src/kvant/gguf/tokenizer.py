"""Load the tokenizer of a GGUF file, with the ids and rules that llama.cpp takes from the file.

transformers reads the vocabulary and the chat template. It respells special tokens that are not
written in the alphabet of byte-level vocabularies, and does not know all rules of splitting.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvant.gguf.families import check_file
from kvant.gguf.file import GGUFError, GGUFHeader, read_list

TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
BYTE_LEVEL = "gpt2"  # tokenizer.ggml.model
END_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
# Tokens that end a turn wherever a vocabulary has them, also where the file names none of them.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
    }
)
# Pre-tokenizers of byte-level vocabularies. A word in the vocabulary is one token, whether merges
# lead to it or not, as in Llama 3; a text begins with a token if the file does not say otherwise.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
BEGIN_TEXTS = (*WHOLE_WORDS, "falcon-h1", "midm-2.0", "lfm2", "jina-v5-nano")
SPLIT_BY_TRANSFORMERS = (
    *BEGIN_TEXTS,
    *("dbrx", "smaug-bpe", "qwen2", "qwen35", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    *("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
)
SPLIT_LIKE_GPT2 = (None, "default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "a.x-4.0", "mellum")
SPLIT_DIGITS = (  # like GPT-2, and each digit is alone
    *("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"),
)


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of transformers."""
    header = check_file(path)
    pre_tokenizer, is_byte_level = header.values.get("tokenizer.ggml.pre"), _is_byte_level(header)
    known = SPLIT_BY_TRANSFORMERS + SPLIT_LIKE_GPT2 + SPLIT_DIGITS
    if is_byte_level and pre_tokenizer not in known:
        raise GGUFError(
            f"its pre-tokenizer {pre_tokenizer!r} is unknown, so that texts would be split "
            "differently: load the safetensors that it was made from"
        )
    tokenizer = _read_tokenizer(path)
    if is_byte_level:
        tokenizer = _restore_special_tokens(tokenizer, header)
    if pre_tokenizer in WHOLE_WORDS:  # transformers ignores this
        tokenizer.backend_tokenizer.model.ignore_merges = True
    if pre_tokenizer in SPLIT_DIGITS:
        _split_digits(tokenizer)
    if is_byte_level and pre_tokenizer in BEGIN_TEXTS:
        tokenizer.add_bos_token = header.values.get("tokenizer.ggml.add_bos_token", True)
    if tokenizer.add_eos_token:
        tokenizer.add_eos_token = False
    is_embedding = header.get_setting("pooling_type") is not None
    if is_embedding and header.values.get("tokenizer.ggml.add_eos_token") is True:
        _append_end_token(tokenizer)
    return tokenizer


def find_end_tokens(header: GGUFHeader, vocab_size: int) -> list[int]:
    """Return the tokens that end a turn or a text, the one that the file calls so first."""
    stated = [header.values.get(key) for key in END_IDS]
    found = [i for i, text in enumerate(read_list(header, TOKENS)) if text in END_TEXTS]
    ids = [token for token in stated if isinstance(token, int) and 0 <= token < vocab_size]
    return list(dict.fromkeys(ids + found))


def _is_byte_level(header: GGUFHeader) -> bool:
    return header.values.get("tokenizer.ggml.model") == BYTE_LEVEL


def _read_tokenizer(path: Path) -> Any:
    """Read the file alone: transformers prefers a tokenizer.json that lies beside it."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        link = Path(folder, "model.gguf")
        link.symlink_to(path.resolve())
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=link.name)
    tokenizer.name_or_path = str(path.parent)
    return tokenizer


def _restore_special_tokens(tokenizer: Any, header: GGUFHeader) -> Any:
    """Give special tokens their text and id of the file; remove tokens beyond its vocabulary."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    texts, kinds = read_list(header, TOKENS), read_list(header, KINDS)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    spelled = {token: text for text, token in state["model"]["vocab"].items()}
    special = {
        text: (token, kind == CONTROL)
        for token, (text, kind) in enumerate(zip(texts, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    }
    added = {entry["content"]: entry for entry in state["added_tokens"]}
    wrong = {text for text, (token, _) in special.items() if added.get(text, {}).get("id") != token}
    if not wrong and all(entry["id"] < len(texts) for entry in added.values()):
        return tokenizer
    for text in wrong:
        token, is_control = special[text]
        state["model"]["vocab"].pop(spelled.get(token), None)
        state["model"]["vocab"][text] = token
        added[text] = {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": is_control,
        }
    kept = [entry for entry in added.values() if entry["id"] < len(texts)]
    state["added_tokens"] = sorted(kept, key=lambda entry: entry["id"])
    state["post_processor"] = None
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        add_bos_token=header.values.get("tokenizer.ggml.add_bos_token", False),
        **{
            name: texts[token]
            for name, token in ids.items()
            if isinstance(token, int) and 0 <= token < len(texts)
        },
    )


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _append_end_token(tokenizer: Any) -> None:
    """Append the end token to each encoded text: models with last-token pooling need it."""
    from tokenizers import processors

    backend, token = tokenizer.backend_tokenizer, tokenizer.eos_token
    if token is None:
        raise GGUFError("it has add_eos_token, and no end token (tokenizer.ggml.eos_token_id)")
    end = processors.TemplateProcessing(
        single="$A END",
        pair="$A $B END",
        special_tokens=[{"id": "END", "ids": [tokenizer.eos_token_id], "tokens": [token]}],
    )
    first = backend.post_processor  # such as one that prepends a token
    backend.post_processor = end if first is None else processors.Sequence([first, end])
