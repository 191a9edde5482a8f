"""Tokens from a forward that is captured once: those of ordinary forwards, or a reason why not."""

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
from attention.kernels import GPU, needed
from hf.graphs import traced
from hf.zoo import FAMILIES, OWN_ATTENTION, build, names, worded
from kvant.generation.decoder import TransformersDecoder

pytestmark = [
    needed,
    pytest.mark.usefixtures("pages_as_on_a_gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, of NaN and infinity
    pytest.mark.filterwarnings("ignore:.*lru_cache"),
]
PROMPT = 64  # a page
TWO = {"num_hidden_layers": 2}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
ASKED = "trying to get value out of a tracing tensor"
ROWS, MASK = "needs dense rows", "a mask that is a tensor"
REFUSED = {  # why single tokens of these families come from ordinary forwards
    **dict.fromkeys(("opt", "biogpt"), ASKED),
    **dict.fromkeys(OWN_ATTENTION, ROWS),
    **dict.fromkeys(("diffllama", "doge", "jetmoe"), ROWS),
    "falcon": MASK,
    **dict.fromkeys(("minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), "latents"),
    "deepseek_v32": "layers of DynamicIndexedLayer",
    "mllama": "layers of CrossAttentionLayer",
}
# By default fewer layers, one of each kind: the interpreter takes a second for each and each token.
SHOWN: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 2, "no_rope_layer_interval": 2},
    "gemma3n": {},
    **{family: {} for family in REFUSED},
    "opt": {"num_hidden_layers": 2},
    "biogpt": {"num_hidden_layers": 2},
}
CELLS = [
    pytest.param(
        family,
        worded(family, spec),
        prompt,
        shown.get(family, {}),
        marks=[] if family in shown else pytest.mark.laws,
    )
    for spec, prompt, shown in (
        ("raw,capacity=80", 20, SHOWN),
        ("affine4,tail=3,capacity=160", PROMPT, {"llama": {"num_hidden_layers": 1}}),
    )
    for family in names("decoder")
]
CELLS += [
    pytest.param(family, spec, prompt, {}, marks=pytest.mark.laws)
    for family, spec, prompt, changes in (cell.values for cell in CELLS)
    if changes
]


class Pair:
    """The same tokens by ordinary forwards, and by steps."""

    def __init__(self, model: Any, spec: str) -> None:
        self.decoders = TransformersDecoder(model), TransformersDecoder(model, capture=traced)
        self.caches = [decoder.make_cache(spec) for decoder in self.decoders]

    @property
    def stepped(self) -> Any:
        return self.caches[1]

    def read(self, *tokens: int) -> None:
        """They must agree on what follows; on the CPU sums are made in another order."""
        plain, stepped = (
            decoder.compute_logits(list(tokens), cache)
            for decoder, cache in zip(self.decoders, self.caches, strict=True)
        )
        assert (plain - stepped).abs().max() < 1e-4 * (plain.max() - plain.min())

    def each(self, verb: str, *args: Any) -> None:
        for cache in self.caches:
            getattr(cache, verb)(*args)


def tokens(family: str, count: int) -> list[int]:
    ids: Tensor = FAMILIES[family].inputs(tokens=count)["input_ids"]
    return ids[0].tolist()


@pytest.mark.parametrize(("family", "spec", "prompt", "changes"), CELLS)
def test_steps_are_ordinary_forwards(
    family: str, spec: str, prompt: int, changes: dict[str, Any]
) -> None:
    """At 68 tokens a page falls due; behind 8 all windows of these models end."""
    count = 6 if prompt == PROMPT else 3
    pair, text = Pair(build(family, **changes), spec), tokens(family, prompt + count)
    pair.read(*text[:prompt])
    for token in text[prompt:]:
        pair.read(token)
    plain, stepped = (cache.stats() for cache in pair.caches)
    why = pair.stepped.context.replay_stats.refusal
    if family in REFUSED:
        assert REFUSED[family] in why and stepped["replayed"] == 0
        assert f"tokens are not replayed: {why}" in str(kvant.explain(pair.stepped))
    else:
        assert why is None and stepped["replayed"] == count - 1
        assert stepped["fused"] == stepped["appends"] - len(pair.stepped.context.attention_stats)
    for name in ("length", "appends"):
        assert plain[name] == stepped[name]


@pytest.mark.parametrize(
    ("spec", "seed", "count"),
    [
        ("raw", 2048, 9),  # seeds with which all of it is done within a few tokens
        ("affine8,tail=0", 3237, 9),
        ("affine4/turbo3,tail=2,window=66,sinks=2", 216, 9),
        *(
            pytest.param(spec, 1, 20, marks=pytest.mark.laws)
            for spec in ("raw", "affine8,tail=0", "affine4/turbo3,tail=2,window=66,sinks=2")
        ),
    ],
)
def test_whatever_else_is_done_between_two_tokens(spec: str, seed: int, count: int) -> None:
    """Memory grows, rewinds, is recoded and forked; chunks are read: replays must notice."""
    model, draw = build("llama", **SMALL), random.Random(seed)
    pair, text = Pair(model, spec), tokens("llama", 300)
    pair.read(*text[:PROMPT])
    for token in text[PROMPT : PROMPT + count]:
        with torch.inference_mode(draw.random() < 0.5):
            pair.read(token)
        verb = draw.randrange(8)
        if verb == 0:
            to = pair.stepped.reachable(pair.stepped.length - 2)
            pair.each("rewind", to)
        elif verb == 1:
            pair.read(*text[200 : 200 + draw.randrange(2, 9)])
        elif verb == 2:
            pair.caches = [cache.fork() for cache in pair.caches]
        elif verb == 3 and "window" not in spec:
            pair.each("recode", draw.choice(("affine8", "turbo4v4", "raw")))
    assert pair.stepped.stats()["replayed"] > count // 4
    assert pair.stepped.context.replay_stats.refusal is None


def test_steps_are_compiled_where_the_host_is_told_to() -> None:
    model, seen = build("llama", **SMALL | TWO), list[str]()

    def compiling(graph: Any, given: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    model.generation_config.compile_config = CompileConfig(backend=compiling)
    pair, text = Pair(model, "affine4/turbo3,tail=3,capacity=160"), tokens("llama", 80)
    pair.decoders[1]._capture = lambda forward, *given: forward
    pair.read(*text[: PROMPT + 4])
    for token in text[PROMPT + 4 : PROMPT + 7]:
        pair.read(token)
    assert pair.stepped.stats()["replayed"] == 2
    assert seen.count("kvant.put.default") == seen.count("kvant.decode.default") == 2


def test_weights_that_move_are_captured_anew() -> None:
    """The graph would read memory that is somebody else's by then."""
    model = build("llama", **SMALL | TWO)
    pair, text = Pair(model, "raw"), tokens("llama", 80)
    pair.read(*text[:PROMPT])
    for begin in (PROMPT, PROMPT + 3):
        for token in text[begin : begin + 2]:
            pair.read(token)
        for weight in model.parameters():
            weight.data = weight.data * 1.01
        pair.read(*text[:2])
    assert pair.stepped.stats()["replayed"] == 2


def test_sinks_are_appended_after_a_rewind_below_them() -> None:
    """A step writes behind them only, and memory is what it was."""
    model = build("llama", **SMALL)
    pair, text = Pair(model, "raw,window=70,sinks=4"), tokens("llama", 40)
    pair.read(*text[:20])
    for again in (20, 25):
        for token in text[again : again + 3]:
            pair.read(token)
        pair.each("rewind", 2)
    for token in text[30:38]:
        pair.read(token)
    assert pair.stepped.context.replay_stats.refusal is None


def test_a_layer_that_was_away_is_found_where_it_came_back_to() -> None:
    model = build("llama", **SMALL | TWO)
    pair, text = Pair(model, "affine8,tail=0"), tokens("llama", 90)
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


def test_a_forward_that_somebody_put_before_a_module_is_called_each_time() -> None:
    model, called = build("llama", **SMALL), list[int]()
    head, plain = model.lm_head, model.lm_head.forward
    head.forward = lambda x: (called.append(len(x)), plain(x))[1]
    pair, text = Pair(model, "raw"), tokens("llama", 40)
    for count in range(1, 6):
        pair.read(text[count])
        assert len(called) == 2 * count
    assert "lm_head has a forward of its own" in pair.stepped.context.replay_stats.refusal


def test_an_adapter_that_is_switched_between_two_turns_is_seen() -> None:
    """Its weights lie where they lay: a plain value says whether they count."""
    model = build("llama", **SMALL)
    model.lm_head = head = Adapted(model.lm_head)
    pair, text = Pair(model, "raw"), tokens("llama", 40)
    for begin, head.strength in ((0, 1.0), (10, 3.0), (20, 1.0)):
        pair.read(*text[begin : begin + 5])
        for token in text[begin + 5 : begin + 8]:
            pair.read(token)
    assert pair.stepped.stats()["replayed"] == 6


def test_a_model_out_of_training_is_replayed() -> None:
    model = build("llama", **SMALL)
    pair = Pair(model, "raw")
    for text in ([3, 4, 5], [6]):
        pair.read(*text)
    model.train()
    pair.read(20, 21)  # with which another reply begins
    pair.read(7)
    pair.read(8)
    assert "training" in pair.stepped.context.replay_stats.refusal
    model.eval()
    for token in (9, 10, 11):
        pair.read(token)
    replays = pair.stepped.context.replay_stats
    assert replays.refusal is None and replays.num_tokens >= 2


def test_a_forward_that_dies_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, text = Pair(build("llama", **SMALL | TWO), "raw"), tokens("llama", 80)
    pair.read(*text[:PROMPT])
    pair.read(text[PROMPT])
    monkeypatch.setattr(
        type(pair.stepped.states), "arrive", lambda *_: (_ for _ in ()).throw(KeyError("lost"))
    )
    pair.read(text[PROMPT + 1])
    assert pair.stepped.context.replay_stats.refusal == "KeyError: 'lost'"
    monkeypatch.undo()
    for token in text[PROMPT + 2 : PROMPT + 5]:
        pair.read(token)
    assert pair.stepped.length == PROMPT + 5


def in_training(model: Any) -> None:
    model.train()


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *args: None)


def offloaded(model: Any) -> None:
    model.model.layers[0]._hf_hook = object()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (in_training, "the model is in training mode"),
        (hooked, "model.layers.1 has hooks, which a replay does not call"),
        (offloaded, "model.layers.0 has hooks, which a replay does not call"),
    ],
)
def test_a_model_that_does_more_than_its_kernels_is_not_replayed(change: Any, why: str) -> None:
    model = build("llama")
    change(model)
    decoder = TransformersDecoder(model, capture=traced)
    cache = decoder.make_cache("raw")
    for text in ([3, 4, 5], [6], [7], [8]):
        decoder.compute_logits(text, cache)
    assert (cache.stats()["replayed"], cache.context.replay_stats.refusal) == (0, why)


def test_a_format_that_the_kernels_do_not_read_is_not_replayed() -> None:
    pair = Pair(build("llama", **SMALL | TWO), "fp8")
    for text in ([3, 4, 5], [6], [7]):
        pair.read(*text)
    assert "keys of Fp8" in pair.stepped.context.replay_stats.refusal


def test_a_full_cache_refuses_a_token_as_it_always_did() -> None:
    decoder = TransformersDecoder(build("llama", **SMALL | TWO), capture=traced)
    cache = decoder.make_cache("raw,capacity=7")
    for text in ([3, 4, 5], [6], [7], [8], [9]):
        decoder.compute_logits(text, cache)
    with pytest.raises(kvant.CapacityError, match="8 tokens for a capacity of 7"):
        decoder.compute_logits([10], cache)
    assert cache.stats()["replayed"] == 3 and cache.length == 7


def test_no_cache_is_kept_alive() -> None:
    decoder = TransformersDecoder(build("llama", **SMALL | TWO), capture=traced)
    cache = decoder.make_cache("raw")
    for text in ([3, 4, 5], [6], [7], [8]):
        decoder.compute_logits(text, cache)
    room = weakref.ref(cache.layers[0].paged_layer.view().keys.open)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None and room() is None


@pytest.fixture
def traced_sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        "kvant.generation.session.make_decoder",
        lambda model: TransformersDecoder(model, capture=traced),
    )
    return


@pytest.mark.usefixtures("traced_sessions")
def test_a_reply_is_the_same() -> None:
    from generation.speakers import Numbers
    from kvant.generation import Session

    model = build("llama", **SMALL)
    prompt = tokens("llama", 20) * 3
    session = Session(model, Numbers(), "affine4,tail=3,capacity=160", draft="ngram")
    said = [step.token for step in session.send(prompt, max_new_tokens=12)]
    told = session.stats()["replayed"]
    assert told > 2
    ids, cache = torch.tensor([prompt]), kvant.cache_for(model, "affine4,tail=3,capacity=160")
    expected = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert said == expected[0, len(prompt) :].tolist()


@pytest.mark.skipif(not GPU, reason="there is no GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_on_a_gpu_tokens_come_from_a_graph(family: str) -> None:
    model, text = build(family).to("cuda"), tokens(family, PROMPT + 6)
    plain, stepped = TransformersDecoder(model), TransformersDecoder(model)
    plain._capture = None
    caches = [decoder.make_cache("affine4,tail=3,capacity=160") for decoder in (plain, stepped)]
    for part in (text[:PROMPT], *([token] for token in text[PROMPT:])):
        x, y = plain.compute_logits(part, caches[0]), stepped.compute_logits(part, caches[1])
        assert (x - y).abs().max() < 1e-4 * (x.max() - x.min())
    assert caches[1].context.replay_stats.refusal is None
    assert caches[1].stats()["replayed"] == 5
