"""What a model supports is found on the model itself, before it gives a wrong token."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

import kvant
from hf.shrinking import tiny
from hf.zoo import COMMON, build
from kvant import demo
from kvant.hf import SupportLevel, get_support, support

TOKENS = 8
TOGETHER = ("llama", "gpt_oss", "deepseek_v3", "mamba2", "mixtral")
IN_TURNS = ("bloom", "mllama", "deepseek_v32")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict is known from another test."""
    monkeypatch.setattr(support, "_known_support", {})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


def prompt(length: int) -> list[int]:
    random = torch.Generator().manual_seed(length)
    return torch.randint(5, 120, (length,), generator=random).tolist()


def stock(model: PreTrainedModel, tokens: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([tokens])
    mask, count = torch.ones_like(ids), TOKENS
    out: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options
    )
    return out[0, len(tokens) :].tolist()


def served(model: PreTrainedModel, tokenizer: Any, *lengths: int) -> list[list[int]]:
    with kvant.Engine(model, tokenizer, "raw", pack=False) as engine:
        streams = [
            engine.submit(prompt(length), max_new_tokens=TOKENS, ignore_end=True)
            for length in lengths
        ]
        return [list(stream.result().tokens) for stream in streams]


@pytest.mark.parametrize("name", TOGETHER)
def test_sequences_of_different_lengths_decode_together(name: str) -> None:
    assert get_support(build(name)) == (SupportLevel.RAGGED_BATCH, "")


@pytest.mark.parametrize("name", IN_TURNS)
def test_sequences_decode_in_turns_where_they_cannot_together(name: str) -> None:
    found = get_support(build(name))
    assert found.level is SupportLevel.ONE_SEQUENCE
    assert found.reason


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_next"])
def test_rounding_of_16_bits_parts_no_sequences(name: str) -> None:
    assert get_support(build(name).bfloat16()).level is SupportLevel.RAGGED_BATCH


@pytest.mark.parametrize(
    ("name", "reason"),
    [("inkling_text", "made for one length"), ("moss_transcribe_diarize", "no position_ids")],
)
def test_a_model_with_one_position_for_the_batch_decodes_in_turns(
    name: str, reason: str, tokenizer: Any
) -> None:
    model = tiny(name)
    assert get_support(model).level is SupportLevel.ONE_SEQUENCE
    assert reason in get_support(model).reason
    lengths = (5, 70, 33)
    alone = [stock(model, prompt(length)) for length in lengths]
    assert served(model, tokenizer, *lengths) == alone


@pytest.mark.parametrize("ask", ["cache_for", "attach", "generate", "session", "engine"])
def test_a_model_without_a_cache_is_refused(ask: str, tokenizer: Any) -> None:
    model = tiny("openai-gpt")
    asked = {
        "cache_for": lambda: kvant.cache_for(model),
        "attach": lambda: kvant.attach(model),
        "generate": lambda: kvant.generate(model, tokenizer, prompt(5)),
        "session": lambda: kvant.Session(model, tokenizer),
        "engine": lambda: kvant.Engine(model, tokenizer, "raw"),
    }
    with pytest.raises(kvant.CacheError, match=r"OpenAIGPTLMHeadModel keeps no cache.*leave kvant"):
        asked[ask]()


@pytest.mark.parametrize("ask", ["attach", "generate", "session", "engine"])
def test_a_model_that_keeps_state_in_its_modules_is_refused(ask: str, tokenizer: Any) -> None:
    model = tiny("recurrent_gemma")
    asked = {
        "attach": lambda: kvant.attach(model),
        "generate": lambda: kvant.generate(model, tokenizer, prompt(5)),
        "session": lambda: kvant.Session(model, tokenizer),
        "engine": lambda: kvant.Engine(model, tokenizer, "raw"),
    }
    with pytest.raises(kvant.CacheError, match="RecurrentGemmaForCausalLM keeps state"):
        asked[ask]()
    assert stock(model, prompt(20), past_key_values=kvant.cache_for(model)) == stock(
        model, prompt(20)
    )


@pytest.mark.parametrize("name", ["xlm", "cpmant"])
def test_a_forward_that_needs_the_whole_text_is_left_to_generate(name: str, tokenizer: Any) -> None:
    model = tiny(name)
    for ask in (kvant.Session, kvant.Engine):
        with pytest.raises(kvant.CacheError, match=r"does not continue.*kvant.cache_for"):
            ask(model, tokenizer, "raw")
    with kvant.attach(model, guard=False):
        assert kvant.hf.get_attachments(model)


def test_layers_in_loops_are_refused_for_what_they_are(tokenizer: Any) -> None:
    model = tiny("dory")
    with pytest.raises(kvant.CacheError, match=r"layers in loops.*leave kvant out"):
        kvant.Session(model, tokenizer, "raw")


def test_what_a_vision_model_keeps_between_forwards_is_no_state() -> None:
    """It keeps how far an image moves the positions: given positions do not depend on it."""
    text = {**COMMON, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.model.rope_deltas = kept = torch.ones(1, 1, dtype=torch.int64)
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    assert model.model.rope_deltas is kept


class Counting(torch.nn.Module):
    """A norm that adds how often it was called: state of no sequence, and of every one."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.calls = norm, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x) * (1 + self.calls)


@pytest.fixture
def counting() -> Iterator[PreTrainedModel]:
    model = build("llama")
    model.model.norm = Counting(model.model.norm)
    yield model


class Noting(Counting):
    """A norm that keeps what it was given last, and reads nothing of it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.norm(x)


def test_state_is_found_by_what_it_changes(counting: PreTrainedModel) -> None:
    found = get_support(counting)
    assert found.level is SupportLevel.NOTHING
    assert "keeps state" in found.reason


def test_what_a_module_keeps_and_does_not_read_is_no_state() -> None:
    model = build("llama")
    model.model.norm = Noting(model.model.norm)
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    assert not hasattr(model.model.norm, "last")


def test_the_check_leaves_the_model_as_it_was(counting: PreTrainedModel) -> None:
    counting.train()
    counting.model.layers[0].eval()
    before = torch.random.get_rng_state()
    get_support(counting)
    assert counting.training and not counting.model.layers[0].training
    assert counting.model.norm.calls == 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not kvant.hf.get_attachments(counting)
    assert counting.config._attn_implementation == "sdpa"


def test_an_attached_model_stays_attached() -> None:
    model = build("llama")
    with kvant.attach(model, "affine8", guard=False):
        held = kvant.hf.get_attachments(model)
        support._known_support.clear()
        assert get_support(model).level is SupportLevel.RAGGED_BATCH
        assert kvant.hf.get_attachments(model) == held


def test_a_second_model_of_the_class_costs_no_forward(
    caplog: pytest.LogCaptureFixture, tokenizer: Any
) -> None:
    caplog.set_level(logging.INFO, logger="kvant")
    for _ in range(2):
        kvant.Session(build("llama"), tokenizer)
    kvant.attach(build("llama"), guard=False)
    lines = [line for line in caplog.messages if "checked in" in line]
    assert len(lines) == 1
    assert lines[0].startswith("LlamaForCausalLM: sequences of different lengths decode together")
    kvant.Session(build("llama", num_hidden_layers=2), tokenizer)
    assert len([line for line in caplog.messages if "checked in" in line]) == 2


def test_a_forward_that_failed_is_asked_again() -> None:
    model = build("llama")
    right = model.forward

    def failing(input_ids: Tensor, position_ids: Tensor, cache: Any, use_cache: bool) -> None:
        raise RuntimeError("out of luck\nwith details")

    model.forward = failing
    with pytest.raises(kvant.CacheError, match=r"\(RuntimeError: out of luck\)"):
        get_support(model).require_level(SupportLevel.ONE_SEQUENCE)
    model.forward = right
    assert get_support(model).level is SupportLevel.RAGGED_BATCH


def test_a_configuration_may_hold_what_is_no_json(tokenizer: Any) -> None:
    model = build("llama")
    model.config.extra = {("a", 1): object(), 2: {3}}
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    assert len(served(model, tokenizer, 5)[0]) == TOKENS


def offload(module: torch.nn.Module) -> None:
    """Keep the weight of a module on meta between its forwards, as accelerate does."""
    weight, name = module.weight, "weight"
    meta = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
    module._parameters[name] = meta
    module.register_forward_pre_hook(lambda *_: module._parameters.update({name: weight}))
    module.register_forward_hook(lambda *_: module._parameters.update({name: meta}))


@pytest.mark.parametrize(
    ("name", "level"), [("llama", SupportLevel.RAGGED_BATCH), ("bloom", SupportLevel.ONE_SEQUENCE)]
)
def test_a_model_with_some_weights_on_meta_is_checked(name: str, level: SupportLevel) -> None:
    model = build(name)
    offload(model.get_input_embeddings())
    assert model.device.type == "meta"
    assert get_support(model).level is level
    assert model.device.type == "meta"


def test_a_model_that_is_all_on_meta_is_not_computed_with() -> None:
    assert get_support(build("bloom").to("meta")) == (SupportLevel.RAGGED_BATCH, "")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
@pytest.mark.filterwarnings("error::UserWarning")
def test_logits_that_say_nothing_leave_no_verdict(value: float) -> None:
    model = build("llama")
    model.lm_head.weight.data.fill_(value)
    found = get_support(model)
    assert found.level is SupportLevel.ONE_SEQUENCE
    assert "NaN or all alike" in found.reason
    assert get_support(build("llama")).level is SupportLevel.RAGGED_BATCH


def test_logits_that_are_nan_beside_others_leave_no_verdict() -> None:
    model = build("llama")
    hook = model.register_forward_hook(spoil_pairs)
    assert get_support(model).level is SupportLevel.ONE_SEQUENCE
    hook.remove()
    assert get_support(model).level is SupportLevel.RAGGED_BATCH


def spoil_pairs(module: Any, args: Any, output: Any) -> None:
    if len(output.logits) > 1:
        output.logits[1, :, :9] = torch.nan


def test_two_sequences_that_failed_together_are_asked_again() -> None:
    """Out of memory is a plain RuntimeError on a CPU."""
    model = build("llama")
    right = model.forward

    def failing(input_ids: Tensor, position_ids: Tensor, cache: Any, use_cache: bool) -> Any:
        if len(input_ids) > 1:
            raise RuntimeError("not enough memory")
        return right(input_ids, position_ids=position_ids, use_cache=use_cache, cache=cache)

    model.forward = failing
    assert get_support(model) == (SupportLevel.ONE_SEQUENCE, "RuntimeError: not enough memory")
    model.forward = right
    assert get_support(model).level is SupportLevel.RAGGED_BATCH


@pytest.mark.parametrize("name", [*TOGETHER, *IN_TURNS, "inkling_text"])
def test_a_verdict_on_finite_logits_is_kept(name: str) -> None:
    model = tiny(name) if name == "inkling_text" else build(name)
    get_support(model)
    assert len(support._known_support) == 1
