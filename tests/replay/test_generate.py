"""Test the tokens that `generate` of an attached model replays: the bits of ordinary forwards."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

import kvant
from hf.graphs import trace_forward
from hf.zoo import FAMILIES, OWN_ATTENTION, build, family_names, valid_spec
from kvant.hf import TransformersCache
from kvant.native import get_library

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
FEW = ("llama", "qwen3", "gemma2", "mistral", "gpt_oss", "phi3", "mixtral")  # replayed if attached
PROMPT, TOKENS = 50, 20  # a page is sealed during the replays, and another begins
FORMATS = ("raw", "affine8", "affine4,tail=3", "raw,window=24,sinks=2")


def make_text(family: str, sequences: int = 1, tokens: int = PROMPT) -> Tensor:
    return FAMILIES[family].inputs(sequences, tokens)["input_ids"]


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    """Generate `TOKENS` tokens; return the output of transformers, with the logits."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS} | options
    return model.generate(
        ids, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


def count_replayed(output: Any) -> int:
    """Return the number of tokens that were replayed into the cache of an output."""
    cache = output.past_key_values
    assert isinstance(cache, TransformersCache)
    return cache.context.replay_stats.num_tokens


def assert_same(output: Any, expected: Any) -> None:
    assert torch.equal(output.sequences, expected.sequences)
    assert all(map(torch.equal, output.logits, expected.logits))


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        pytest.param(
            family,
            spec,
            marks=[] if family in FEW and (row + column) % 4 == 0 else pytest.mark.laws,
        )
        for column, spec in enumerate(FORMATS)
        for row, family in enumerate(dict.fromkeys((*FEW, *family_names("decoder", "hybrid"))))
    ],
)
def test_logits_equal_those_of_ordinary_forwards(family: str, spec: str) -> None:
    """In two texts, of which the second is replayed from its first decoded token on."""
    model = build(family)
    with kvant.attach(model, valid_spec(family, spec), guard=False):
        for seed, count in ((0, TOKENS - 6), (1, TOKENS - 1)):
            ids = FAMILIES[family].inputs(2, PROMPT, seed)["input_ids"]
            try:
                expected = generate(model, ids, disable_compile=True)
            except kvant.UnsupportedView:  # a window needs an attention that kvant can replace
                assert family in OWN_ATTENTION or family in ("diffllama", "doge", "jetmoe")
                return
            output = generate(model, ids)
            assert_same(output, expected)
            assert family not in FEW or count_replayed(output) == count


@pytest.fixture
def model() -> Any:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    return model


def test_ordinary_forwards_decode_if_compiling_is_disabled(model: Any) -> None:
    assert count_replayed(generate(model, make_text("llama"), disable_compile=True)) == 0


def test_capture_is_reused_for_the_next_text(model: Any) -> None:
    ids = make_text("llama")
    assert count_replayed(generate(model, ids)) == TOKENS - 6  # two forwards, four warmups
    assert count_replayed(generate(model, ids)) == TOKENS - 1
    batch = make_text("llama", sequences=3)
    assert_same(generate(model, batch), generate(model, batch, disable_compile=True))


def test_changed_weights_are_captured_again(model: Any) -> None:
    ids = make_text("llama")
    before = generate(model, ids)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
        model.model.norm.weight *= 0.5
    after = generate(model, ids)
    assert not torch.equal(before.sequences, after.sequences)
    assert_same(after, generate(model, ids, disable_compile=True))


@pytest.mark.parametrize("spec", ("affine8", "raw,window=24,sinks=2"))
def test_left_padding_is_hidden(spec: str) -> None:
    """Padding of a model with sinks is not stored; other padding is, and needs the mask."""
    model = build("llama")
    kvant.attach(model, spec, guard=False)
    ids, mask = make_text("llama", sequences=2), torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :7] = 0
    output = generate(model, ids, attention_mask=mask)
    assert_same(output, generate(model, ids, attention_mask=mask, disable_compile=True))
    alone = generate(model, ids[:1, 7:])
    assert torch.equal(output.sequences[0, PROMPT:], alone.sequences[0, PROMPT - 7 :])


@pytest.mark.parametrize(
    "options",
    (
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
        {"output_hidden_states": True},
        {"prefill_chunk_size": 16},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ),
    ids=lambda options: next(iter(options)),
)
def test_options_have_their_effect(model: Any, options: dict[str, Any]) -> None:
    ids = make_text("llama")
    generate(model, ids)
    output = generate(model, ids, **options)
    expected = generate(model, ids, disable_compile=True, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert set(output) == set(expected)
    if "hidden_states" in expected:
        for states, needed in zip(output.hidden_states, expected.hidden_states, strict=True):
            assert all(map(torch.equal, states, needed))


def test_sampled_tokens_are_those_of_ordinary_forwards(model: Any) -> None:
    ids, sampled = make_text("llama"), []
    for disable in (True, False, False):
        torch.manual_seed(3)
        sampled.append(
            model.generate(
                ids, do_sample=True, max_new_tokens=TOKENS, top_k=20, disable_compile=disable
            )
        )
    assert torch.equal(sampled[0], sampled[1])
    assert torch.equal(sampled[0], sampled[2])


def test_a_given_cache_goes_on(model: Any) -> None:
    """After a rewind, a fork, and with a cache of transformers."""
    ids, caches = make_text("llama"), [kvant.cache_for(model, "affine8") for _ in range(2)]
    outputs = []
    for cache, disable in zip(caches, (False, True), strict=True):
        generate(model, ids, past_key_values=cache, disable_compile=disable)
        cache.trim(9)
        text = torch.cat([ids, make_text("llama", tokens=15)], 1)
        fork = cache.fork()
        for one in (cache, fork):
            outputs.append(generate(model, text, past_key_values=one, disable_compile=disable))
    assert count_replayed(outputs[0]) > TOKENS
    for output in outputs[:2]:
        assert_same(output, outputs[2])
    own = generate(model, ids, past_key_values=DynamicCache(config=model.config))
    assert isinstance(own.past_key_values, DynamicCache)


@pytest.mark.parametrize(
    "make_copy", (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)))
)
def test_a_copy_replays_its_own_weights(model: Any, make_copy: Any) -> None:
    ids = make_text("llama")
    expected = generate(model, ids)
    other = make_copy(model)
    with torch.no_grad():
        other.model.norm.weight *= 0.3
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    assert_same(generate(other, ids), generate(other, ids, disable_compile=True))
    assert_same(generate(model, ids), expected)


def test_threads_generate_at_the_same_time(model: Any) -> None:
    texts = [FAMILIES["llama"].inputs(1, PROMPT, seed)["input_ids"] for seed in range(4)]
    expected = [generate(model, ids, disable_compile=True).sequences for ids in texts]
    generate(model, texts[0])
    actual: dict[int, Tensor] = {}

    def run(number: int) -> None:
        for _ in range(3):
            actual[number] = generate(model, texts[number]).sequences

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(actual[number], ids) for number, ids in enumerate(expected))


def test_pages_of_a_dropped_cache_are_released(model: Any) -> None:
    """The recorded forward is kept, and binds those of the next cache."""
    ids = make_text("llama")
    output = generate(model, ids)
    storage = next(iter(output.past_key_values.states.state.storages.values()))
    pages = [weakref.ref(side.open) for side in storage.sides.values()]
    assert all(page() is not None for page in pages)
    del output, storage
    gc.collect()
    assert all(page() is None for page in pages)
    assert count_replayed(generate(model, ids)) == TOKENS - 1


def test_static_caches_of_transformers_are_compiled(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = list[Any]()

    def compile_call(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_call)
    compile_config = CompileConfig(backend="eager")
    compile_config._compile_all_devices = True
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + TOKENS)
    options = {"past_key_values": cache, "compile_config": compile_config}
    assert generate(model, make_text("llama"), **options).past_key_values is cache
    assert [options["backend"] for options in compiled] == ["eager"]


def test_failed_capture_falls_back_to_ordinary_forwards(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr("kvant.replay.replayer.capture_forward", fail)
    ids = make_text("llama")
    output = generate(model, ids)
    assert_same(output, generate(model, ids, disable_compile=True))
    assert "lost" in output.past_key_values.context.replay_stats.refusal


def test_graphs_are_captured_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu_page_layout: Any
) -> None:
    """With traced operators in place of a CUDA graph; on the CPU the order of sums differs."""
    model = build("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    monkeypatch.setattr("kvant.replay.generate.get_graph_capture", lambda model: trace_forward)
    kvant.attach(model, "raw,capacity=96", guard=False)
    ids = make_text("llama")
    output = generate(model, ids, max_new_tokens=6)
    expected = generate(model, ids, max_new_tokens=6, disable_compile=True)
    assert count_replayed(output) > 0
    assert torch.allclose(torch.cat(output.logits), torch.cat(expected.logits), atol=1e-3)


def test_detached_model_is_not_replayed(model: Any) -> None:
    generate(model, make_text("llama"))
    kvant.detach(model)
    assert not {"get_compiled_call", "_valid_auto_compile_criteria"} & vars(model).keys()
    output = generate(model, make_text("llama"), past_key_values=kvant.cache_for(model, "affine8"))
    assert count_replayed(output) == 0
