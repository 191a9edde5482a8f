"""Test tokens from captured forwards: equal to ordinary forwards, or a reason why not."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig

import kvant
from attention.kernels import DEVICE, GPU, needed
from hf.graphs import CAPTURE
from hf.zoo import FAMILIES, OWN_ATTENTION, build, family_names, valid_spec
from kvant.generation.decoder import TransformersDecoder

pytestmark = [
    needed,
    pytest.mark.usefixtures("gpu_page_layout"),
    # the interpreter warns of NaN and infinity
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*lru_cache"),
]
PROMPT = 64  # one page
TWO = {"num_hidden_layers": 2}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
ASKED = "synchronizing" if GPU else "trying to get value out of a tracing tensor"
ROWS, MASK = "needs dense rows", "a mask that is a tensor"
REFUSED = {  # why single tokens of these families use ordinary forwards
    **dict.fromkeys(("opt", "biogpt"), ASKED),
    **dict.fromkeys(OWN_ATTENTION, ROWS),
    **dict.fromkeys(("diffllama", "doge", "jetmoe"), ROWS),
    "falcon": MASK,
    **dict.fromkeys(("minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "latents"),
    "deepseek_v32": "layers of DynamicIndexedLayer",
    "mllama": "layers of CrossAttentionLayer",
    **({"gpt_oss": ASKED} if GPU else {}),
}
# By default fewer layers, one of each type: the interpreter needs a second per layer and token.
SHOWN: dict[str, dict[str, Any]] = {
    **{family: {} for family in REFUSED},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 2, "no_rope_layer_interval": 2},
    "gemma3n": {},
    "opt": {"num_hidden_layers": 2},
    "biogpt": {"num_hidden_layers": 2},
}
CELLS = [
    pytest.param(
        family,
        valid_spec(family, spec),
        prompt,
        shown.get(family, {}),
        marks=[] if family in shown else pytest.mark.laws,
    )
    for spec, prompt, shown in (
        ("raw,capacity=80", 20, SHOWN),
        ("affine4,tail=3,capacity=160", PROMPT, {"llama": {"num_hidden_layers": 1}}),
    )
    for family in family_names("decoder")
]
CELLS += [
    pytest.param(family, spec, prompt, {}, marks=pytest.mark.laws)
    for family, spec, prompt, changes in (cell.values for cell in CELLS)
    if changes
]


class DecoderPair:
    """The same tokens by ordinary forwards and by replayed steps."""

    def __init__(self, model: Any, spec: str) -> None:
        model.to(DEVICE)
        self.decoders = (
            TransformersDecoder(model),
            TransformersDecoder(model, capture=CAPTURE),
        )
        self.decoders[0].__dict__["make_replayer"] = lambda **options: None
        self.caches = [decoder.make_cache(spec) for decoder in self.decoders]

    @property
    def stepped(self) -> Any:
        return self.caches[1]

    def read(self, *tokens: int) -> None:
        """Compare the logits of both; on the CPU the order of sums differs."""
        plain, replayed = (
            decoder.compute_logits(list(tokens), cache)
            for decoder, cache in zip(self.decoders, self.caches, strict=True)
        )
        assert (plain - replayed).abs().max() < 1e-4 * (plain.max() - plain.min())

    def each(self, verb: str, *args: Any) -> None:
        for cache in self.caches:
            getattr(cache, verb)(*args)


def make_tokens(family: str, count: int) -> list[int]:
    ids: Tensor = FAMILIES[family].inputs(tokens=count)["input_ids"]
    return ids[0].tolist()


def test_layers_that_also_recur_are_named_in_the_reason() -> None:
    pair = DecoderPair(build("falcon_h1"), "raw,capacity=80")
    pair.read(*make_tokens("falcon_h1", 8))
    pair.read(5)
    assert "layers of HybridLayer" in pair.stepped.context.replay_stats.refusal


@pytest.mark.parametrize(("family", "spec", "prompt", "changes"), CELLS)
def test_replayed_steps_equal_ordinary_forwards(
    family: str, spec: str, prompt: int, changes: dict[str, Any]
) -> None:
    """At 68 tokens a page is sealed; after 8 tokens all windows of these models are full."""
    count = 6 if prompt == PROMPT else 3
    pair, text = DecoderPair(build(family, **changes), spec), make_tokens(family, prompt + count)
    pair.read(*text[:prompt])
    for token in text[prompt:]:
        pair.read(token)
    plain, replayed = (cache.stats() for cache in pair.caches)
    reason = pair.stepped.context.replay_stats.refusal
    if family in REFUSED:
        assert REFUSED[family] in reason and replayed["replayed"] == 0
        assert f"tokens are not replayed: {reason}" in str(kvant.explain(pair.stepped))
    else:
        assert reason is None and replayed["replayed"] == count - 1
        assert replayed["fused"] == replayed["appends"] - len(pair.stepped.context.attention_stats)
    for name in ("length", "appends"):
        assert plain[name] == replayed[name]


@pytest.mark.parametrize(
    ("spec", "seed", "count"),
    [
        ("raw", 2048, 9),  # seeds that exercise every operation within a few tokens
        ("affine8,tail=0", 3237, 9),
        ("affine4/turbo3,tail=2,window=66,sinks=2", 216, 9),
        *(
            pytest.param(spec, 1, 20, marks=pytest.mark.laws)
            for spec in ("raw", "affine8,tail=0", "affine4/turbo3,tail=2,window=66,sinks=2")
        ),
    ],
)
def test_replay_survives_any_operation_between_tokens(spec: str, seed: int, count: int) -> None:
    """Memory is reallocated, rewound, recoded and forked, chunks are read: replays must notice."""
    model, draw = build("llama", **SMALL), random.Random(seed)
    pair, text = DecoderPair(model, spec), make_tokens("llama", 300)
    pair.read(*text[:PROMPT])
    for token in text[PROMPT : PROMPT + count]:
        with torch.inference_mode(draw.random() < 0.5):
            pair.read(token)
        verb = draw.randrange(8)
        if verb == 0:
            length = pair.stepped.reachable(pair.stepped.length - 2)
            pair.each("rewind", length)
        elif verb == 1:
            pair.read(*text[200 : 200 + draw.randrange(2, 9)])
        elif verb == 2:
            pair.caches = [cache.fork() for cache in pair.caches]
        elif verb == 3 and "window" not in spec:
            pair.each("recode", draw.choice(("affine8", "turbo4v4", "raw")))
    assert pair.stepped.stats()["replayed"] > count // 4
    assert pair.stepped.context.replay_stats.refusal is None


def test_compiled_steps_follow_the_transformers_setting() -> None:
    model, calls = build("llama", **SMALL | TWO), list[str]()

    def compiling(graph: Any, inputs: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model.generation_config.compile_config = CompileConfig(backend=compiling)
    pair, text = DecoderPair(model, "affine4/turbo3,tail=3,capacity=160"), make_tokens("llama", 80)
    pair.decoders[1]._capture = lambda forward, *inputs: forward
    pair.read(*text[: PROMPT + 4])
    for token in text[PROMPT + 4 : PROMPT + 7]:
        pair.read(token)
    assert pair.stepped.stats()["replayed"] == 2
    assert calls.count("kvant.put.default") == calls.count("kvant.decode.default") == 2


def test_moved_weights_are_captured_again() -> None:
    """The graph would read freed memory."""
    model = build("llama", **SMALL | TWO)
    pair, text = DecoderPair(model, "raw"), make_tokens("llama", 80)
    pair.read(*text[:PROMPT])
    for begin in (PROMPT, PROMPT + 3):
        for token in text[begin : begin + 2]:
            pair.read(token)
        for weight in model.parameters():
            weight.data = weight.data * 1.01
        pair.read(*text[:2])
    assert pair.stepped.stats()["replayed"] == 2


def test_sinks_are_appended_after_a_rewind_below_them() -> None:
    """A step writes after them only, and memory is unchanged."""
    model = build("llama", **SMALL)
    pair, text = DecoderPair(model, "raw,window=70,sinks=4"), make_tokens("llama", 40)
    pair.read(*text[:20])
    for length in (20, 25):
        for token in text[length : length + 3]:
            pair.read(token)
        pair.each("rewind", 2)
    for token in text[30:38]:
        pair.read(token)
    assert pair.stepped.context.replay_stats.refusal is None


def test_relocated_layer_is_found() -> None:
    model = build("llama", **SMALL | TWO)
    pair, text = DecoderPair(model, "affine8,tail=0"), make_tokens("llama", 90)
    pair.read(*text[:PROMPT])
    for token in text[PROMPT : PROMPT + 4]:
        pair.read(token)
        pair.each("offload", 0)
        pair.each("prefetch", 0)
    pair.read(*text[80:83])
    pair.read(text[84])


class Adapted(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.strength = inner, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.strength + self.strength


def test_patched_module_forward_is_called_every_time() -> None:
    model, calls = build("llama", **SMALL), list[int]()
    head, plain = model.lm_head, model.lm_head.forward
    head.forward = lambda x: (calls.append(len(x)), plain(x))[1]
    pair, text = DecoderPair(model, "raw"), make_tokens("llama", 40)
    calls.clear()  # the support of a model is tried out, once for all tests
    for count in range(1, 6):
        pair.read(text[count])
        assert len(calls) == 2 * count
    assert "lm_head has a forward of its own" in pair.stepped.context.replay_stats.refusal


def test_adapter_switched_between_turns_is_used() -> None:
    """Its weights stay in place: a plain attribute enables them."""
    model = build("llama", **SMALL)
    model.lm_head = head = Adapted(model.lm_head)
    pair, text = DecoderPair(model, "raw"), make_tokens("llama", 40)
    for begin, head.strength in ((0, 1.0), (10, 3.0), (20, 1.0)):
        pair.read(*text[begin : begin + 5])
        for token in text[begin + 5 : begin + 8]:
            pair.read(token)
    assert pair.stepped.stats()["replayed"] == 6


def test_model_in_eval_mode_is_replayed() -> None:
    model = build("llama", **SMALL)
    pair = DecoderPair(model, "raw")
    for text in ([3, 4, 5], [6]):
        pair.read(*text)
    model.train()
    pair.read(20, 21)  # another reply begins
    pair.read(7)
    pair.read(8)
    assert "training" in pair.stepped.context.replay_stats.refusal
    model.eval()
    for token in (9, 10, 11):
        pair.read(token)
    replays = pair.stepped.context.replay_stats
    assert replays.refusal is None and replays.num_tokens >= 2


def test_failed_forward_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, text = DecoderPair(build("llama", **SMALL | TWO), "raw"), make_tokens("llama", 80)
    pair.read(*text[:PROMPT])
    pair.read(text[PROMPT])
    monkeypatch.setattr(
        "kvant.replay.replayer.commit_tokens", lambda *_: (_ for _ in ()).throw(KeyError("lost"))
    )
    pair.read(text[PROMPT + 1])
    assert pair.stepped.context.replay_stats.refusal == "KeyError: 'lost'"
    monkeypatch.undo()
    for token in text[PROMPT + 2 : PROMPT + 5]:
        pair.read(token)
    assert pair.stepped.length == PROMPT + 5


def set_training(model: Any) -> None:
    model.train()


def add_hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *args: None)


def offload_weights(model: Any) -> None:
    model.model.layers[0]._hf_hook = object()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_training, "the model is in training mode"),
        (add_hook, "model.layers.1 has hooks, which a replay does not call"),
        (offload_weights, "model.layers.0 has hooks, which a replay does not call"),
    ],
)
def test_model_with_side_effects_is_not_replayed(change: Any, message: str) -> None:
    model = build("llama").to(DEVICE)
    change(model)
    decoder = TransformersDecoder(model, capture=CAPTURE)
    cache = decoder.make_cache("raw")
    for text in ([3, 4, 5], [6], [7], [8]):
        decoder.compute_logits(text, cache)
    assert (cache.stats()["replayed"], cache.context.replay_stats.refusal) == (0, message)


def test_unsupported_format_is_not_replayed() -> None:
    pair = DecoderPair(build("llama", **SMALL | TWO), "fp8")
    for text in ([3, 4, 5], [6], [7]):
        pair.read(*text)
    assert "keys of Fp8" in pair.stepped.context.replay_stats.refusal


def test_full_cache_refuses_a_token() -> None:
    decoder = TransformersDecoder(build("llama", **SMALL | TWO).to(DEVICE), capture=CAPTURE)
    cache = decoder.make_cache("raw,capacity=7")
    for text in ([3, 4, 5], [6], [7], [8], [9]):
        decoder.compute_logits(text, cache)
    with pytest.raises(kvant.CapacityError, match="8 tokens for a capacity of 7"):
        decoder.compute_logits([10], cache)
    assert cache.stats()["replayed"] == 3 and cache.length == 7


def test_replay_keeps_no_cache_alive() -> None:
    decoder = TransformersDecoder(build("llama", **SMALL | TWO).to(DEVICE), capture=CAPTURE)
    cache = decoder.make_cache("raw")
    for text in ([3, 4, 5], [6], [7], [8]):
        decoder.compute_logits(text, cache)
    room = weakref.ref(cache.layers[0].paged_layer.view().keys.open)
    cache_ref = weakref.ref(cache)
    del cache
    gc.collect()
    assert cache_ref() is None and room() is None


@pytest.fixture
def traced_sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        "kvant.generation.loop.make_decoder",
        lambda model: TransformersDecoder(model, capture=CAPTURE),
    )
    return


@pytest.mark.usefixtures("traced_sessions")
def test_reply_is_the_same() -> None:
    from generation.speakers import Numbers
    from kvant.generation import Session

    model = build("llama", **SMALL).to(DEVICE)
    prompt = make_tokens("llama", 20) * 3
    session = Session(model, Numbers(), "affine4,tail=3,capacity=160", draft="ngram")
    reply = [step.token for step in session.send(prompt, max_new_tokens=12)]
    replayed = session.stats()["replayed"]
    assert replayed > 2
    ids = torch.tensor([prompt], device=DEVICE)
    cache = kvant.cache_for(model, "affine4,tail=3,capacity=160")
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert reply == expected[0, len(prompt) :].tolist()
