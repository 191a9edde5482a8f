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
REPLAYED_FAMILIES = (
    "llama",
    "qwen3",
    "gemma2",
    "mistral",
    "gpt_oss",
    "phi3",
    "mixtral",
)  # replayed if attached
PROMPT, TOKENS = 50, 24  # a page is sealed during the replays, and another begins
REPLAYED = TOKENS - 6  # the prompt's token, that of the first forward, and four warmups are not
FORMATS = ("raw", "affine8", "affine4,tail=3", "raw,window=24,sinks=2")


NOT_REPLAYED = ("num_beams", "output_hidden_states")


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
            marks=[]
            if family in REPLAYED_FAMILIES and (row + column) % 4 == 0
            else pytest.mark.laws,
        )
        for column, spec in enumerate(FORMATS)
        for row, family in enumerate(
            dict.fromkeys((*REPLAYED_FAMILIES, *family_names("decoder", "hybrid")))
        )
    ],
)
def test_logits_equal_those_of_ordinary_forwards(family: str, spec: str) -> None:
    model, ids = build(family), make_text(family, sequences=2)
    with kvant.attach(model, valid_spec(family, spec), guard=False):
        try:
            expected = generate(model, ids, disable_compile=True)
        except kvant.UnsupportedView:  # a window needs an attention that kvant can replace
            assert family in OWN_ATTENTION or family in ("diffllama", "doge", "jetmoe")
            return
        output = generate(model, ids)
        assert_same(output, expected)
        assert family not in REPLAYED_FAMILIES or count_replayed(output) == REPLAYED


@pytest.fixture
def model() -> Any:
    model = build("llama")
    kvant.attach(model, "affine8", guard=False)
    return model


def test_ordinary_forwards_decode_if_compiling_is_disabled(model: Any) -> None:
    output = generate(model, make_text("llama"), disable_compile=True)
    assert count_replayed(output) == 0
    assert "disable_compile" in str(kvant.explain(output.past_key_values))


def change_embedding(model: Any) -> None:
    embedding = model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.flip(0))


class ScaledHead(torch.nn.Module):
    """A head with an attribute that is a tensor, but no weight and no buffer."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head, self.options = head, {"scale": torch.tensor(1.0)}

    def forward(self, x: Tensor) -> Any:
        return self.head(x) * self.options["scale"]


@pytest.mark.parametrize(
    "change",
    (
        change_embedding,
        lambda model: model.lm_head.options.update(scale=torch.tensor(-1.0)),
        lambda model: model.half(),
        lambda model: model.lm_head.register_forward_hook(lambda module, x, out: -out),
    ),
    ids=("weight", "attribute", "dtype", "hook"),
)
def test_a_model_may_change_between_calls(model: Any, change: Any) -> None:
    """Each call records the forward anew; an older one is not kept alive."""
    ids = make_text("llama")
    model.lm_head = ScaledHead(model.lm_head)
    with torch.no_grad():
        before = generate(model, ids)
        change(model)
        after = generate(model, ids)
        assert count_replayed(before) == REPLAYED
        assert_same(after, generate(model, ids, disable_compile=True))
        assert not all(map(torch.equal, before.logits, after.logits))


def test_a_cache_goes_on_with_a_changed_model(model: Any) -> None:
    """Even if no forward of transformers lies between the replays of two calls."""
    ids, outputs = make_text("llama"), []
    for disable in (False, True):
        cache = kvant.cache_for(model, "affine8")
        text = generate(model, ids, past_key_values=cache, disable_compile=disable).sequences
        change_embedding(model)
        options = {"past_key_values": cache, "prefill_chunk_size": 16}
        outputs.append(generate(model, text, disable_compile=disable, **options))
        change_embedding(model)
    assert count_replayed(outputs[0]) > REPLAYED
    assert_same(*outputs)


def test_a_refusal_ends_with_its_call(model: Any) -> None:
    ids = make_text("llama")
    cache = kvant.cache_for(model, "raw,prune=keydiff:25%")
    output = generate(model, ids, past_key_values=cache)
    assert "prunes" in str(kvant.explain(output.past_key_values))
    assert count_replayed(generate(model, ids)) == REPLAYED


@pytest.mark.parametrize(
    ("family", "spec"),
    [("llama", "affine8"), ("gemma2", "raw,window=24"), ("mistral", "raw,window=24,sinks=2")],
)
def test_padded_batch_is_replayed(family: str, spec: str) -> None:
    """Its padding is not stored: the sequences are read as of different lengths."""
    model, ids = build(family), make_text(family, sequences=2)
    kvant.attach(model, spec, guard=False)
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :7] = 0
    output = generate(model, ids, attention_mask=mask)
    assert_same(output, generate(model, ids, attention_mask=mask, disable_compile=True))
    assert count_replayed(output) == REPLAYED
    alone = generate(model, ids[:1, 7:])
    assert torch.equal(output.sequences[0, PROMPT:], alone.sequences[0, PROMPT - 7 :])


def test_stored_padding_needs_the_mask(model: Any) -> None:
    ids, mask = make_text("llama", sequences=2), torch.ones(2, PROMPT, dtype=torch.long)
    mask[0, :7] = 0
    outputs = [
        generate(
            model,
            ids,
            attention_mask=mask,
            past_key_values=kvant.cache_for(model, "affine8"),
            disable_compile=disable,
        )
        for disable in (False, True)
    ]
    assert_same(*outputs)
    assert "hides stored rows" in str(kvant.explain(outputs[0].past_key_values))


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
    assert (count_replayed(output) > 0) != (next(iter(options)) in NOT_REPLAYED)
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


def test_recorded_forward_and_its_cache_are_released(model: Any) -> None:
    output = generate(model, make_text("llama"))
    storage = next(iter(output.past_key_values.states.state.storages.values()))
    pages = [weakref.ref(side.open) for side in storage.sides.values()]
    assert all(page() is not None for page in pages)
    weight = weakref.ref(model.get_input_embeddings().weight)
    change_embedding(model)
    del output, storage
    gc.collect()
    assert all(page() is None for page in pages)
    assert weight() is None


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


def test_a_model_that_drops_its_cache_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 reads a text again where its rotations change."""
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    model = build("phi3", original_max_position_embeddings=PROMPT + 8)
    kvant.attach(model, "raw", guard=False)
    ids = make_text("phi3")
    output = generate(model, ids)
    assert torch.equal(output.sequences, generate(model, ids, disable_compile=True).sequences)


def test_short_calls_are_not_recorded(model: Any) -> None:
    output = generate(model, make_text("llama"), max_new_tokens=12)
    assert count_replayed(output) == 0
    assert "max_new_tokens=12" in str(kvant.explain(output.past_key_values))


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
    monkeypatch.setattr("kvant.replay.generate.MIN_NEW_TOKENS", 6)
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
