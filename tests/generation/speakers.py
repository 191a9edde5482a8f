"""Models that generate text, and their expected output by transformers' own loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf.zoo import build
from kvant import demo
from kvant.generation import Step, generate

DEMO = "demo"
PROMPT = "def read(self, count):\n    "
FAMILIES = ["llama", "gemma3", "gpt_oss", "falcon_h1"]
NEW = 20


class Numbers:
    """A tokenizer for models that generate numbers: token 7 is `<7>`."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(number) for number in text.replace("<", " ").replace(">", " ").split()]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"<{token}>" for token in tokens)


@cache
def model_of(name: str) -> Any:
    if name != DEMO:
        return build(name)
    return AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()


@cache
def tokenizer_of(name: str) -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH) if name == DEMO else Numbers()


@cache
def prompt_of(name: str) -> tuple[int, ...]:
    if name == DEMO:
        return tuple(tokenizer_of(name).encode(PROMPT))
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(3, 128, (17,), generator=generator).tolist())


@cache
def expected_tokens(name: str) -> list[int]:
    """Return the output of transformers with its own cache and loop."""
    ids = torch.tensor([prompt_of(name)])
    out = model_of(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    tokens = out[0, ids.shape[1] :].tolist()
    assert len(tokens) == NEW, "the model ended its text, so another prompt is needed"
    return tokens


def start_generation(name: str, **options: Any) -> Iterator[Step]:
    inputs = {"max_new_tokens": NEW, "ignore_end": True} | options
    return generate(model_of(name), tokenizer_of(name), prompt_of(name), **inputs)


def generate_tokens(name: str, **options: Any) -> list[int]:
    return [step.token for step in start_generation(name, **options)]
