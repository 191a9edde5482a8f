"""Test that prompts of transformers users work in `generate`, or raise one line with the
alternative.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import DEMO, model_of, prompt_of, tokenizer_of

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def generate_tokens(prompt: Any, *, tokenizer: Any = None, **options: Any) -> list[int]:
    speaker = tokenizer or tokenizer_of(DEMO)
    inputs: dict[str, Any] = {"max_new_tokens": 4, "ignore_end": True} | options
    return [step.token for step in kvant.generate(model_of(DEMO), speaker, prompt, **inputs)]


def test_token_ids_may_be_lists_or_tensors() -> None:
    """Regression: `tokenizer(text, return_tensors="pt").input_ids` failed in int()."""
    ids = torch.tensor(prompt_of(DEMO))
    expected = generate_tokens(list(prompt_of(DEMO)))
    for prompt in (ids, ids[None], ids.int(), ids.numpy(), tuple(ids.tolist()), [ids.tolist()]):
        assert generate_tokens(prompt) == expected


def test_messages_use_the_chat_template() -> None:
    tokenizer = copy.deepcopy(tokenizer_of(DEMO))
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "def f("}]
    text = "[system]Be.[user]def f("
    assert generate_tokens(messages, tokenizer=tokenizer) == generate_tokens(
        text, tokenizer=tokenizer
    )


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (["one", "two"], r"one prompt at a time is generated; .* for one in prompts"),
        (torch.ones(2, 3, dtype=torch.long), "one prompt at a time"),
        ([[1, 2], [3]], "one prompt at a time"),
        ({"input_ids": torch.ones(1, 3)}, r"a mapping is no prompt: .* \['input_ids'\]"),
        ([{"role": "user", "content": "hi"}], "without a chat template: give one text"),
        ([1.5], "a prompt of torch.float32: token ids are whole numbers"),
        (torch.ones(1, 1, 3, dtype=torch.long), r"token ids \[1, 1, 3\]: \[T\] or \[1, T\]"),
        (None, "NoneType is no prompt: text, token ids or messages"),
        (b"def", "bytes is no prompt"),
        ([], "the prompt has no tokens"),
    ],
)
def test_unsupported_prompt_is_refused_in_one_line(prompt: Any, error: str) -> None:
    with pytest.raises(kvant.PromptError, match=error) as caught:
        generate_tokens(prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["def ", [1, 2]])
def test_missing_tokenizer_is_refused(prompt: Any) -> None:
    with pytest.raises(TypeError, match="tokenizer=None: the model's own is needed"):
        kvant.generate(model_of(DEMO), None, prompt)
    with pytest.raises(TypeError, match="tokenizer=None"):
        kvant.Session(model_of(DEMO), None)


def test_core_cache_is_refused_for_a_transformers_model() -> None:
    """Regression: it failed in the model, at `get_query_offset`."""
    with pytest.raises(TypeError, match=r"Qwen3ForCausalLM, kvant\.cache_for\(model, spec\), is"):
        generate_tokens("def ", kv_cache=kvant.Cache(6, "affine8"))
    for word in (None, 5):
        with pytest.raises(TypeError, match=f"kv_cache={word}: a spec"):
            generate_tokens("def ", kv_cache=word)


def test_an_empty_cache_of_the_model_is_used() -> None:
    cache = kvant.cache_for(model_of(DEMO), "affine8")
    assert generate_tokens("def ", kv_cache=cache) == generate_tokens("def ", kv_cache="affine8")
    with pytest.raises(ValueError, match=r"start with an empty one; kvant\.Session keeps"):
        generate_tokens("def ", kv_cache=cache)


def test_model_name_instead_of_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="'gpt2' is not a model: give a loaded"):
        kvant.generate("gpt2", tokenizer_of(DEMO), "def ")


def test_budget_may_have_units() -> None:
    usual = generate_tokens("def ")
    assert generate_tokens("def ", strategy="adaptive", budget="64MiB") == usual
    with pytest.raises(kvant.SpecError, match="size 'lots': a number and a unit"):
        generate_tokens("def ", strategy="adaptive", budget="lots")
