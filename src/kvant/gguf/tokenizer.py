"""Load the tokenizer of a GGUF file, with the ids and rules that llama.cpp takes from the file.

transformers reads the vocabulary and the chat template. It respells special tokens that are not
written in the alphabet of byte-level vocabularies, and does not know all rules of splitting.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvant.gguf.families import check_file, require_package
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
# Pre-tokenizers of byte-level vocabularies: rules that split a text before merges. With the first
# ones, a word in the vocabulary is one token whether merges lead to it or not, and a text begins
# with a token unless the file says otherwise.
LIKE_LLAMA3 = (
    *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    *("jina-v5-nano", "tekken"),
)
SPLIT_BY_TRANSFORMERS = (
    *LIKE_LLAMA3,
    *("dbrx", "smaug-bpe", "qwen2", "qwen35", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    *("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
)
SPLIT_LIKE_GPT2 = (
    *("gpt-2", "phi-2", "olmo", "mpt", "jais", "a.x-4.0", "mellum", "gigachat", "exaone4"),
)
SPLIT_DIGITS = (  # like GPT-2, and each digit is alone
    *("smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b"),
)
PHI3 = "phi3"  # spaces after its special tokens are removed, but not after these:
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
State = dict[str, Any]  # of a tokenizer, as in tokenizer.json


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a file; raise GGUFError if it would split texts differently."""
    header = check_file(path)
    require_package()
    pre_tokenizer, is_byte_level = header.values.get("tokenizer.ggml.pre"), _is_byte_level(header)
    known = SPLIT_BY_TRANSFORMERS + SPLIT_LIKE_GPT2 + SPLIT_DIGITS
    if is_byte_level and pre_tokenizer not in known:
        what = f"has the unknown pre-tokenizer {pre_tokenizer!r}"
        raise GGUFError(
            f"it {what if pre_tokenizer else 'names no pre-tokenizer'}, so that texts would be "
            "split differently: load the safetensors that it was made from"
        )
    tokenizer = _restore_special_tokens(_read_tokenizer(path), header)
    tokenizer.name_or_path = str(path.parent)
    if pre_tokenizer in LIKE_LLAMA3:  # transformers ignores this
        tokenizer.backend_tokenizer.model.ignore_merges = True
    if pre_tokenizer in SPLIT_DIGITS:
        _split_digits(tokenizer)
    if is_byte_level and pre_tokenizer in LIKE_LLAMA3:
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
        return AutoTokenizer.from_pretrained(folder, gguf_file=link.name)


def _restore_special_tokens(tokenizer: Any, header: GGUFHeader) -> Any:
    """Return a tokenizer whose special tokens have the text, id and spaces of the file."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    is_byte_level, texts = _is_byte_level(header), read_list(header, TOKENS)
    state: State = json.loads(tokenizer.backend_tokenizer.to_str())
    if is_byte_level:
        is_changed = _restore_texts(state, texts, read_list(header, KINDS))
    else:
        is_changed = header.architecture == PHI3 and _remove_spaces(state)
    if not is_changed:
        return tokenizer
    state["post_processor"] = None
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: header.values.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        add_bos_token=header.values.get("tokenizer.ggml.add_bos_token", not is_byte_level),
        **{
            name: texts[token]
            for name, token in ids.items()
            if isinstance(token, int) and 0 <= token < len(texts)
        },
    )


def _restore_texts(state: State, texts: list[str], kinds: list[int]) -> bool:
    """Respell special tokens, and remove tokens beyond the vocabulary; tell whether any changed."""
    vocabulary: dict[str, int] = state["model"]["vocab"]
    spelled = {token: text for text, token in vocabulary.items()}
    special = {
        text: (token, kind == CONTROL)
        for token, (text, kind) in enumerate(zip(texts, kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    }
    added: dict[str, State] = {entry["content"]: entry for entry in state["added_tokens"]}
    wrong = [text for text, (token, _) in special.items() if added.get(text, {}).get("id") != token]
    if not wrong and all(entry["id"] < len(texts) for entry in added.values()):
        return False
    for text in wrong:
        token, is_control = special[text]
        vocabulary.pop(spelled.get(token, ""), None)
        vocabulary[text] = token
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added[text] = {"id": token, "content": text, **flags, "special": is_control}
    kept = [entry for entry in added.values() if entry["id"] < len(texts)]
    state["added_tokens"] = sorted(kept, key=lambda entry: entry["id"])
    return True


def _remove_spaces(state: State) -> bool:
    """Let special tokens of Phi-3 take the spaces and newlines that follow them."""
    for entry in state["added_tokens"]:
        entry["rstrip"] = entry["special"] and entry["content"] not in PHI3_KEEPS_SPACES
    return True


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
