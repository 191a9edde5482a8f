"""Test CPU replay of captured forwards: the bits of ordinary forwards, or a reason why not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import kvant
from hf.zoo import FAMILIES, build, family_names, valid_spec
from kvant.cache import merge
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import get_support
from kvant.native import get_library
from kvant.pages import storage
from kvant.replay import Replayer
from kvant.weights import packing as weights

pytestmark = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
FEW = ("llama", "qwen3", "gemma3", "mistral", "phi3", "gptj", "mamba", "mixtral", "deepseek_v3")
PROMPT, TOKENS = 55, 16  # a page is sealed after the first replays, and another begins
FORMATS = (  # of rows, and of weights
    ("raw", "raw"),
    ("affine8", "raw"),
    ("affine4,tail=3", None),
    ("raw", "affine8"),  # rows of 32 bits
    ("affine8", "affine4"),  # of 16
)
# By default every pair of a family, a format and `attached`.
CELLS = [
    pytest.param(
        family,
        *formats,
        attached,
        marks=[] if family in FEW and (row + column) % 2 == attached else pytest.mark.laws,
    )
    for column, formats in enumerate(FORMATS)
    for row, family in enumerate(family_names("decoder") + family_names("recurrent"))
    for attached in (False, True)
]


REPLAYED_DRAFTS = ("llama", "qwen3", "phi3", "mixtral", "gemma3", "mistral")
DRAFT_CELLS = [
    pytest.param(
        family,
        spec,
        marks=[] if family in FEW and (row + column) % 3 == 0 else pytest.mark.laws,
    )
    for column, spec in enumerate(("raw", "affine8", "affine4,tail=3"))
    for row, family in enumerate(family_names("decoder"))
    if family not in ("mllama", "deepseek_v32")  # layers of transformers store some of their rows
]


def make_decoder_pair(model: Any, spec: str) -> list[tuple[TransformersDecoder, Any]]:
    """Return logits of ordinary forwards, and of replays."""
    pairs = [
        (decoder, decoder.make_cache(spec))
        for decoder in (TransformersDecoder(model), TransformersDecoder(model))
    ]
    pairs[0][0].__dict__["make_replayer"] = lambda **options: None
    return pairs


@pytest.mark.parametrize(("family", "spec", "packed", "attached"), CELLS)
def test_tokens_equal_those_of_ordinary_forwards(
    family: str,
    spec: str,
    packed: str | None,
    attached: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "MIN_PACKED_VALUES", 1)
    model, spec = build(family), valid_spec(family, spec)
    if packed is not None:
        kvant.pack(model if packed == "affine8" else model.bfloat16(), packed)
    if attached:
        kvant.attach(model, spec, guard=False)
    text = FAMILIES[family].inputs(tokens=PROMPT + TOKENS)["input_ids"][0].tolist()
    pair = make_decoder_pair(model, spec)
    for decoder, cache in pair:
        decoder.compute_logits(text[:PROMPT], cache)
    for token in text[PROMPT:]:
        plain, replayed_logits = (decoder.compute_logits([token], cache) for decoder, cache in pair)
        assert torch.equal(plain, replayed_logits)
    replays = pair[1][1].context.replay_stats
    assert (replays.num_tokens == TOKENS - 4) == (replays.refusal is None)
    if family in ("llama", "qwen3", "phi3", "mixtral") or (
        attached and family in ("gemma3", "mistral")
    ):
        assert replays.refusal is None


@pytest.mark.parametrize(("family", "spec"), DRAFT_CELLS)
def test_drafts_equal_those_of_ordinary_forwards(family: str, spec: str) -> None:
    """In one sequence and in two of different lengths, while drafts are rejected."""
    model, spec = build(family), valid_spec(family, spec)
    kvant.attach(model, spec, guard=False)
    text = FAMILIES[family].inputs(tokens=PROMPT + 9)["input_ids"][0].tolist()
    pair, draw = make_decoder_pair(model, spec), random.Random(0)
    for begins in ([0], [0, 7]):
        caches = []
        for decoder, cache in pair:
            parts = [cache.fork() for _ in begins]
            for part, begin in zip(parts, begins, strict=True):
                decoder.compute_logits(text[begin:PROMPT], part)
            caches.append(merge(parts) if len(parts) > 1 else parts[0])
        try:
            compare_drafts([decoder for decoder, _ in pair], caches, text, draw)
        except kvant.UnsupportedView:  # also in ordinary forwards
            assert family not in REPLAYED_DRAFTS
            continue
        replays = caches[1].context.replay_stats
        assert (replays.num_tokens == 4 * 12) == (replays.refusal is None)
        assert replays.refusal is None or family not in REPLAYED_DRAFTS


def compare_drafts(
    decoders: list[TransformersDecoder], caches: list[Any], text: list[int], draw: random.Random
) -> None:
    for _ in range(12):
        lengths = caches[0].lengths
        drafts = [[draw.choice(text) for _ in range(4)] for _ in lengths]
        plain, replayed_logits = (
            decoder.compute_batch_logits(drafts, lengths, cache)
            for decoder, cache in zip(decoders, caches, strict=True)
        )
        assert torch.equal(plain, replayed_logits)
        kept = [length + draw.randint(1, 4) for length in lengths]
        for cache in caches:
            cache.rewind_each(kept)


class CountingHead(nn.Module):
    """A head that counts its forwards in a buffer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)  # type: ignore[operator]
        return self.inner(x)


def test_captured_token_is_computed_once() -> None:
    model = build("llama")
    get_support(model)  # its forwards are not counted
    model.lm_head = CountingHead(model.lm_head)
    decoder = TransformersDecoder(model)
    cache = decoder.make_cache("raw")
    for count in range(1, 12):
        decoder.compute_logits([count], cache)
        assert int(model.lm_head.count) == count
    assert cache.stats()["replayed"] > 4


def test_changed_model_is_captured_again() -> None:
    """Its threads, and its weights."""
    model = build("llama")
    pair, threads = make_decoder_pair(model, "raw"), torch.get_num_threads()
    try:
        for token in range(3, 70):
            if token == 20:
                torch.set_num_threads(threads + 1)
            if token == 40:
                for weight in model.parameters():
                    weight.data = weight.data * 1.01
                for decoder, cache in pair:  # another sequence is read
                    decoder.compute_logits([1, 2], cache)
            plain, replayed_logits = (
                decoder.compute_logits([token], cache) for decoder, cache in pair
            )
            assert torch.allclose(plain, replayed_logits, atol=1e-4)
    finally:
        torch.set_num_threads(threads)
    assert pair[1][1].context.replay_stats.refusal is None
    assert pair[1][1].stats()["replayed"] > 40


def test_changed_thread_count_is_detected_before_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "MIN_PACKED_VALUES", 1)
    model, threads = build("llama").bfloat16(), torch.get_num_threads()
    kvant.pack(model)
    (_, _), (decoder, cache) = make_decoder_pair(model, "raw")
    try:
        for token in range(3, 24):
            if token == 8:  # four ordinary forwards, after that of the first token
                torch.set_num_threads(threads + 1)
            decoder.compute_logits([token], cache)
    finally:
        torch.set_num_threads(threads)
    assert cache.context.replay_stats.refusal is None and cache.stats()["replayed"] > 8


def test_caches_of_one_decoder_are_captured_separately() -> None:
    """Forks of a session run in separate threads and must not share buffers."""
    model = build("llama")
    texts = [[3 + (7 * position + number) % 90 for position in range(60)] for number in range(4)]

    def logits(decoder: TransformersDecoder, text: list[int]) -> list[torch.Tensor]:
        cache = decoder.make_cache("raw")
        outputs = [decoder.compute_logits([token], cache) for token in text]
        assert cache.stats()["replayed"] > 50
        return outputs

    single = [logits(TransformersDecoder(model), text) for text in texts]
    shared = TransformersDecoder(model)
    with ThreadPoolExecutor(len(texts)) as threads:
        concurrent = threads.map(lambda text: logits(shared, text), texts)
        for first, second in zip(single, concurrent, strict=True):
            assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("spec", "moment"), [("raw", 76), ("affine8", 127)])
def test_reallocation_by_another_cache_loses_no_row(
    spec: str, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RESERVE_FACTOR", 1)  # every growth reallocates
    pair = make_decoder_pair(build("llama"), spec)
    for decoder, cache in pair:
        decoder.compute_logits(list(range(3, 70)), cache)
    decoder, cache = pair[1]
    other, run, taken_back = cache.fork(), Replayer._run_forward, list[int]()

    def running(replayer: Replayer) -> torch.Tensor:
        if cache.length == moment:
            storages = cache.states.state.storages.values()
            pages = [ref(side.open) for storage in storages for side in storage.sides.values()]
            del storages
            TransformersDecoder(decoder.model).compute_logits(list(range(3, 90)), other)
            assert all(page() is not None for page in pages), "the kernels still read them"
            taken_back.append(moment)
        return run(replayer)

    monkeypatch.setattr(Replayer, "_run_forward", running)
    for token in range(5, 75):
        plain, replayed_logits = (decoder.compute_logits([token], cache) for decoder, cache in pair)
        assert torch.equal(plain, replayed_logits), token
    assert taken_back == [moment]
    assert cache.stats()["replayed"] > 10
    assert cache.stats()["sealed"] == pair[0][1].stats()["sealed"], "a page was counted twice"


def test_requested_backend_decodes() -> None:
    decoder = TransformersDecoder(build("llama"))
    cache = decoder.make_cache("affine8")
    for backend, count in (("reference", 12), ("native", 24)):
        cache.states.backend = backend
        for token in range(12):
            decoder.compute_logits([token], cache)
        assert cache.stats()["attended"].keys() == {"reference", backend}
        assert (cache.stats()["replayed"] > 4) == (backend == "native") and cache.length == count
    cache.states.backend = "reference"
    before = cache.stats()["attended"]["native"]
    decoder.compute_logits([1], cache)
    assert cache.stats()["attended"]["native"] == before


def test_autocast_weights_are_not_captured() -> None:
    model = build("llama")
    pair = make_decoder_pair(model, "raw")
    for token in range(12):
        with torch.autocast("cpu"):
            plain, replayed_logits = (
                decoder.compute_logits([token], cache) for decoder, cache in pair
            )
        assert torch.equal(plain, replayed_logits)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.01)
    assert "autocast" in str(pair[1][1].context.replay_stats.refusal)


@pytest.mark.parametrize("before", [5, 9], ids=["recorded", "replayed"])
def test_token_without_a_forward_counts_no_replay(before: int) -> None:
    (_, plain), (decoder, cache) = pair = make_decoder_pair(build("llama"), "raw")
    for token in (*range(3, 3 + before), 10**6, *range(20, 30)):
        if token == 10**6:
            for decoder_, cache_ in pair:
                with pytest.raises(IndexError):
                    decoder_.compute_logits([token], cache_)
            continue
        expected, replayed_logits = (
            decoder_.compute_logits([token], cache_) for decoder_, cache_ in pair
        )
        assert torch.equal(expected, replayed_logits)
    assert cache.length == plain.length == before + 10
    assert (
        cache.context.replay_stats.refusal is None and cache.stats()["replayed"] == before + 10 - 5
    )
    other = decoder.make_cache("raw")
    for token in range(3, 12):
        decoder.compute_logits([token], other)
    assert other.stats()["replayed"] > 3


def test_uncapturable_model_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = list[int]()

    def failing(*args: Any, **named: Any) -> Any:
        tried.append(1)
        raise KeyError("lost")

    monkeypatch.setattr("kvant.replay.replayer.capture_forward", failing)
    decoder = TransformersDecoder(build("llama"))
    for _ in range(2):
        cache = decoder.make_cache("raw")
        for token in range(3, 15):
            decoder.compute_logits([token], cache)
        assert cache.context.replay_stats.refusal == "KeyError: 'lost'"
    assert len(tried) == 1
