"""Test support checks, which run the model itself before it can give a wrong token."""

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
def clear_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear verdicts of other tests."""
    monkeypatch.setattr(support, "_known_support", {})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


def make_prompt(length: int) -> list[int]:
    random = torch.Generator().manual_seed(length)
    return torch.randint(5, 120, (length,), generator=random).tolist()


def generate_stock(model: PreTrainedModel, tokens: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([tokens])
    mask, count = torch.ones_like(ids), TOKENS
    out: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options
    )
    return out[0, len(tokens) :].tolist()


def serve_prompts(model: PreTrainedModel, tokenizer: Any, *lengths: int) -> list[list[int]]:
    with kvant.Engine(model, tokenizer, "raw", pack=False) as engine:
        streams = [
            engine.submit(make_prompt(length), max_new_tokens=TOKENS, ignore_end=True)
            for length in lengths
        ]
        return [list(stream.result().tokens) for stream in streams]


@pytest.mark.parametrize("name", TOGETHER)
def test_sequences_of_different_lengths_decode_together(name: str) -> None:
    assert get_support(build(name)) == (SupportLevel.RAGGED_BATCH, "")


@pytest.mark.parametrize("name", IN_TURNS)
def test_sequences_decode_in_turns_where_batching_is_unsupported(name: str) -> None:
    support = get_support(build(name))
    assert support.level is SupportLevel.ONE_SEQUENCE
    assert support.reason


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_next"])
def test_16_bit_rounding_is_not_mistaken_for_a_failure(name: str) -> None:
    assert get_support(build(name).bfloat16()).level is SupportLevel.RAGGED_BATCH


@pytest.mark.parametrize(
    ("name", "reason"),
    [("inkling_text", "made for one length"), ("moss_transcribe_diarize", "no position_ids")],
)
def test_model_with_one_position_per_batch_decodes_in_turns(
    name: str, reason: str, tokenizer: Any
) -> None:
    model = tiny(name)
    assert get_support(model).level is SupportLevel.ONE_SEQUENCE
    assert reason in get_support(model).reason
    lengths = (5, 70, 33)
    single = [generate_stock(model, make_prompt(length)) for length in lengths]
    assert serve_prompts(model, tokenizer, *lengths) == single


@pytest.mark.parametrize("ask", ["cache_for", "attach", "generate", "session", "engine"])
def test_a_model_without_a_cache_is_refused(ask: str, tokenizer: Any) -> None:
    model = tiny("openai-gpt")
    options = {
        "cache_for": lambda: kvant.cache_for(model),
        "attach": lambda: kvant.attach(model),
        "generate": lambda: kvant.generate(model, tokenizer, make_prompt(5)),
        "session": lambda: kvant.Session(model, tokenizer),
        "engine": lambda: kvant.Engine(model, tokenizer, "raw"),
    }
    with pytest.raises(kvant.CacheError, match=r"OpenAIGPTLMHeadModel keeps no cache.*leave kvant"):
        options[ask]()


@pytest.mark.parametrize("ask", ["attach", "generate", "session", "engine"])
def test_model_with_state_in_its_modules_is_refused(ask: str, tokenizer: Any) -> None:
    model = tiny("recurrent_gemma")
    options = {
        "attach": lambda: kvant.attach(model),
        "generate": lambda: kvant.generate(model, tokenizer, make_prompt(5)),
        "session": lambda: kvant.Session(model, tokenizer),
        "engine": lambda: kvant.Engine(model, tokenizer, "raw"),
    }
    with pytest.raises(kvant.CacheError, match="RecurrentGemmaForCausalLM keeps state"):
        options[ask]()
    assert generate_stock(
        model, make_prompt(20), past_key_values=kvant.cache_for(model)
    ) == generate_stock(model, make_prompt(20))


@pytest.mark.parametrize("name", ["xlm", "cpmant"])
def test_forward_that_needs_the_whole_text_is_left_to_generate(name: str, tokenizer: Any) -> None:
    model = tiny(name)
    for ask in (kvant.Session, kvant.Engine):
        with pytest.raises(kvant.CacheError, match=r"cannot continue.*kvant.cache_for"):
            ask(model, tokenizer, "raw")
    with kvant.attach(model, guard=False):
        assert kvant.hf.get_attachments(model)


def test_looped_layers_are_refused_with_their_reason(tokenizer: Any) -> None:
    model = tiny("dory")
    with pytest.raises(kvant.CacheError, match=r"layers in loops.*leave kvant out"):
        kvant.Session(model, tokenizer, "raw")


def test_cache_of_a_vision_tower_is_no_state() -> None:
    """It stores the position offset of an image: explicit positions do not depend on it."""
    text = {**COMMON, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.model.rope_deltas = deltas = torch.ones(1, 1, dtype=torch.int64)
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    assert model.model.rope_deltas is deltas


class CountingNorm(torch.nn.Module):
    """A norm that counts its calls: state shared by all sequences."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.calls = norm, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x) * (1 + self.calls)


@pytest.fixture
def counting_model() -> Iterator[PreTrainedModel]:
    model = build("llama")
    model.model.norm = CountingNorm(model.model.norm)
    yield model


class NotingNorm(CountingNorm):
    """A norm that stores its last input and never reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.norm(x)


def test_state_is_detected_by_its_effect(counting_model: PreTrainedModel) -> None:
    support = get_support(counting_model)
    assert support.level is SupportLevel.NOTHING
    assert "keeps state" in support.reason


def test_unused_module_attribute_is_no_state() -> None:
    model = build("llama")
    model.model.norm = NotingNorm(model.model.norm)
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    assert not hasattr(model.model.norm, "last")


def test_check_leaves_the_model_unchanged(counting_model: PreTrainedModel) -> None:
    counting_model.train()
    counting_model.model.layers[0].eval()
    before = torch.random.get_rng_state()
    get_support(counting_model)
    assert counting_model.training and not counting_model.model.layers[0].training
    assert counting_model.model.norm.calls == 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not kvant.hf.get_attachments(counting_model)
    assert counting_model.config._attn_implementation == "sdpa"


def test_an_attached_model_stays_attached() -> None:
    model = build("llama")
    with kvant.attach(model, "affine8", guard=False):
        attachment = kvant.hf.get_attachments(model)
        support._known_support.clear()
        assert get_support(model).level is SupportLevel.RAGGED_BATCH
        assert kvant.hf.get_attachments(model) == attachment


def test_second_model_of_a_class_needs_no_forward(
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


def test_failed_check_is_repeated() -> None:
    model = build("llama")
    right = model.forward

    def failing(input_ids: Tensor, position_ids: Tensor, cache: Any, use_cache: bool) -> None:
        raise RuntimeError("out of luck\nwith details")

    model.forward = failing
    with pytest.raises(kvant.CacheError, match=r"\(RuntimeError: out of luck\)"):
        get_support(model).require_level(SupportLevel.ONE_SEQUENCE)
    model.forward = right
    assert get_support(model).level is SupportLevel.RAGGED_BATCH


def test_config_may_contain_values_json_cannot_hold(tokenizer: Any) -> None:
    model = build("llama")
    model.config.extra = {("a", 1): object(), 2: {3}}
    assert get_support(model).level is SupportLevel.RAGGED_BATCH
    assert len(serve_prompts(model, tokenizer, 5)[0]) == TOKENS


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


def test_model_fully_on_meta_is_not_run() -> None:
    assert get_support(build("bloom").to("meta")) == (SupportLevel.RAGGED_BATCH, "")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
@pytest.mark.filterwarnings("error::UserWarning")
def test_uninformative_logits_give_no_verdict(value: float) -> None:
    model = build("llama")
    model.lm_head.weight.data.fill_(value)
    support = get_support(model)
    assert support.level is SupportLevel.ONE_SEQUENCE
    assert "NaN or all equal" in support.reason
    assert get_support(build("llama")).level is SupportLevel.RAGGED_BATCH


def test_nan_logits_among_others_give_no_verdict() -> None:
    model = build("llama")
    hook = model.register_forward_hook(spoil_pairs)
    assert get_support(model).level is SupportLevel.ONE_SEQUENCE
    hook.remove()
    assert get_support(model).level is SupportLevel.RAGGED_BATCH


def spoil_pairs(module: Any, args: Any, output: Any) -> None:
    if len(output.logits) > 1:
        output.logits[1, :, :9] = torch.nan


def test_failed_pair_check_is_repeated() -> None:
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
def test_verdict_on_finite_logits_is_cached(name: str) -> None:
    model = tiny(name) if name == "inkling_text" else build(name)
    get_support(model)
    assert len(support._known_support) == 1
