"""Test that tokenizers from GGUF files have the token ids and rules of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvant import demo
from kvant.gguf.file import GGUFError
from kvant.gguf.tokenizer import load_tokenizer

pytest.importorskip("gguf", reason="pip install 'kvant[gguf]'")
from gguf_files import make_model, make_vocabulary, write_file


def write_tokenizer(path: Path, values: dict[str, Any]) -> Path:
    write_file(path, "llama", make_model("llama"), "Q8_0", **values)
    return path


@pytest.mark.parametrize(
    ("values", "appends"),
    [
        ({"tokenizer.ggml.add_eos_token": True, "llama.pooling_type": 3}, True),
        ({"tokenizer.ggml.add_eos_token": False, "llama.pooling_type": 3}, False),
        ({"tokenizer.ggml.add_eos_token": True}, False),  # generates text
    ],
)
def test_texts_of_embedding_models_end_with_the_end_token_if_the_file_says_so(
    values: dict[str, Any], appends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = tmp_path / "one.gguf", AutoTokenizer.from_pretrained(demo.PATH)
    tokens, end = tokenizer.encode("import os"), tokenizer.eos_token_id
    write_file(path, "llama", make_model("llama"), "Q8_0", **values)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    loaded = load_tokenizer(path)
    assert loaded.encode("import os") == ([*tokens, end] if appends else tokens)
    assert loaded.encode("import os", add_special_tokens=False) == tokens


@pytest.mark.parametrize(("name", "tokens"), [("llama-bpe", [3]), ("gpt-2", [2, 1])])
def test_known_words_are_one_token_if_the_pre_tokenizer_says_so(
    name: str, tokens: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: words of Llama 3's vocabulary that no merge leads to were split."""
    path, vocabulary = tmp_path / "one.gguf", {"a": 0, "b": 1, "ab": 2, "abb": 3}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    write_file(path, "llama", make_model("llama"), "Q8_0", **{"tokenizer.ggml.pre": name})
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    assert load_tokenizer(path).encode("abb") == tokens


def test_special_tokens_keep_their_ids(tmp_path: Path) -> None:
    """Regression: tokens beyond the byte alphabet (DeepSeek's) got other ids."""
    user, begin = "<\uff5cUser\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    values = make_vocabulary(user, begin, bos_token_id=299, add_bos_token=True, eos_token_id=297)
    template = {"tokenizer.chat_template": "{{ messages[0].content }}"}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "one.gguf", values | template))
    assert (tokenizer.bos_token, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        begin,
        299,
        297,
    )
    assert tokenizer.encode(f"{user}ab", add_special_tokens=False) == [298, 256]
    assert tokenizer.encode("ab") == [299, 256]
    assert tokenizer.decode([299, 298, 256], skip_special_tokens=True) == "ab"
    assert tokenizer.decode([298]) == user and len(tokenizer) == 300
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]).input_ids == [256]


def test_tokens_beyond_the_vocabulary_are_removed(tmp_path: Path) -> None:
    """Regression: "<|endoftext|>" was a token that Llama 3 does not have."""
    path = write_tokenizer(tmp_path / "one.gguf", make_vocabulary("<|bos|>", bos_token_id=299))
    assert max(load_tokenizer(path).encode("ab<|endoftext|>")) < 300


@pytest.mark.parametrize(
    ("values", "begins"),
    [({}, True), ({"add_bos_token": False}, False), ({"pre": "qwen2"}, False)],
    ids=str,
)
def test_texts_begin_as_the_pre_tokenizer_says_unless_the_file_does(
    values: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    values = make_vocabulary("<|bos|>", bos_token_id=299, **values)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "one.gguf", values))
    assert tokenizer.encode("ab") == ([299, 256] if begins else [256])


@pytest.mark.parametrize(("pooling", "count"), [({"llama.pooling_type": 3}, 1), ({}, 0)])
def test_end_token_is_not_repeated(pooling: dict[str, Any], count: int, tmp_path: Path) -> None:
    values = make_vocabulary("<|end|>", eos_token_id=299, add_eos_token=True)
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "one.gguf", values | pooling))
    assert tokenizer.encode("ab").count(299) == count


def test_neighbours_of_a_file_are_not_read(tmp_path: Path) -> None:
    """Regression: a tokenizer.json in the folder replaced the tokenizer of the file."""
    (tmp_path / "tokenizer.json").write_bytes((demo.PATH / "tokenizer.json").read_bytes())
    values = make_vocabulary() | {"tokenizer.chat_template": "template"}
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "one.gguf", values))
    assert tokenizer.chat_template == "template" and len(tokenizer) == 300


@pytest.mark.parametrize(
    ("name", "message"),
    [("deepseek-llm", "has the unknown pre-tokenizer 'deepseek-llm'"), ("", "names no pre-token")],
)
def test_unknown_pre_tokenizer_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "one.gguf", make_vocabulary(pre=name))
    with pytest.raises(GGUFError, match=f"it {message}.*: load the safetensors"):
        load_tokenizer(path)


def test_special_tokens_of_phi3_take_the_spaces_after_them(tmp_path: Path) -> None:
    path, texts = tmp_path / "one.gguf", ["<unk>", "<s>", "<|user|>", "<|end|>", "\u2581", "a"]
    texts += ["\u2581a", "<0x0A>"]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -3.0, -2.0, -1.0, 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 1, 1, 6],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_file(path, "phi3", make_model("phi3"), "Q8_0", **values)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("<|user|>\n  a<|end|>\n") == [1, 2, 6, 3]
    assert tokenizer.encode("a") == [1, 6] and tokenizer.decode([1, 6, 3]) == "<s> a<|end|>"
    write_file(path, "llama", make_model("llama"), "Q8_0", **values)
    assert 7 in load_tokenizer(path).encode("<|user|>\na")


def test_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tokenizer(tmp_path / "one.gguf", make_vocabulary())
    monkeypatch.setattr("kvant.gguf.families.find_spec", lambda name: None)
    with pytest.raises(GGUFError, match=r"pip install 'kvant\[gguf\]'"):
        load_tokenizer(path)
