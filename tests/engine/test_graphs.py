"""Test batches whose forwards are captured once for some batch sizes and padded to them."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from attention.kernels import needed
from engine.test_engine import generate_alone, make_engine, make_prompts, no_leaks, wait_until_idle
from hf.graphs import trace_forward
from hf.zoo import build
from kvant.engine.batch import max_idle, pad_batch_size
from kvant.generation import TransformersDecoder
from peft_files import save_adapter

pytestmark = [
    needed,
    pytest.mark.usefixtures("gpu_page_layout", no_leaks.__name__),
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def captured_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the batch size of every captured forward."""
    sizes = []

    def capture(forward: Any, ids: Any, lengths: Any) -> Any:
        sizes.append(len(ids))
        return trace_forward(forward, ids, lengths)

    monkeypatch.setattr(
        "kvant.engine.engine.make_decoder",
        lambda model: TransformersDecoder(model, capture=capture),
    )
    return sizes


@pytest.mark.parametrize(
    "spec", ["raw", pytest.param("affine8,window=16,sinks=2", marks=pytest.mark.laws)]
)
def test_graphs_survive_sequences_joining_and_leaving(captured_sizes: list[int], spec: str) -> None:
    model, inputs = build("llama", **SMALL), make_prompts(6, seed=2, longest=12)
    counts = [9, 3, 9, 4, 7, 5]
    with make_engine(model, spec, max_sequences=3) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=n, ignore_end=True)
            for prompt, n in zip(inputs, counts, strict=True)
        ]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    assert set(captured_sizes) <= {1, 2, 4} and 4 in captured_sizes
    assert len(captured_sizes) <= 6, "each new batch captures another graph"
    for prompt, n, tokens in zip(inputs, counts, actual, strict=True):
        assert tokens == generate_alone(model, prompt, spec, max_new_tokens=n)


def test_each_adapter_has_graphs_and_padding(captured_sizes: list[int], tmp_path: Path) -> None:
    model, inputs = build("llama", **SMALL), make_prompts(6, seed=5, longest=9)
    merged = save_adapter(model, tmp_path, r=2, lora_alpha=9, target_modules=["q_proj", "up_proj"])
    models = {None: model, "a": merged}
    names = [None, "a"] * 3
    with make_engine(model, "raw", adapters={"a": tmp_path}) as engine:
        streams = [
            engine.submit(prompt, max_new_tokens=6, ignore_end=True, adapter=name)
            for prompt, name in zip(inputs, names, strict=True)
        ]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    assert captured_sizes.count(4) == 2  # three sequences, padded
    for prompt, name, tokens in zip(inputs, names, actual, strict=True):
        assert tokens == generate_alone(models[name], prompt, max_new_tokens=6)


def test_failed_batch_leaves_no_idle_sequence(captured_sizes: list[int]) -> None:
    model, inputs = build("llama", **SMALL), make_prompts(3, seed=3, longest=9)
    whole, died = model.forward, []

    @wraps(whole)
    def dying(*args: Any, **kwargs: Any) -> Any:
        if len(kwargs["input_ids"]) > 1 and len(died) < 2:
            died.append(kwargs["input_ids"])
            raise RuntimeError("no memory")
        return whole(*args, **kwargs)

    model.forward = dying
    with make_engine(model, "raw", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=6, ignore_end=True) for p in inputs]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    assert died
    del model.forward
    assert actual == [generate_alone(model, prompt, max_new_tokens=6) for prompt in inputs]


def test_model_without_graphs_is_not_padded(
    captured_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, sizes = build("falcon"), make_prompts(3, seed=4, longest=9), []
    rows = TransformersDecoder.compute_batch_logits

    def count_sizes(decoder: TransformersDecoder, tokens: list[int], *args: Any) -> Any:
        sizes.append(len(tokens))
        return rows(decoder, tokens, *args)

    monkeypatch.setattr(TransformersDecoder, "compute_batch_logits", count_sizes)
    with make_engine(model, "raw", max_sequences=3) as engine:
        streams = [engine.submit(p, max_new_tokens=6, ignore_end=True) for p in inputs]
        actual = [list(stream.result().tokens) for stream in streams]
        wait_until_idle(engine)
    monkeypatch.undo()
    assert sizes.count(4) <= 1 and not captured_sizes  # one forward tests whether capture works
    assert actual == [generate_alone(model, prompt, max_new_tokens=6) for prompt in inputs]


def test_idle_sequences_have_capacity() -> None:
    assert [pad_batch_size(n) for n in (1, 2, 3, 5, 9, 16, 17, 33)] == [1, 2, 4, 8, 16, 16, 32, 48]
    assert [max_idle(n) for n in (1, 2, 3, 8, 9, 64)] == [1, 1, 2, 4, 8, 16]
