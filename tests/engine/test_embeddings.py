"""Test embeddings: equal to transformers' own, whatever the chunks and the other requests."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.test_engine import make_engine, make_prompts, no_leaks, wait_until_idle  # noqa: F401
from hf.zoo import build
from kvant.checkpoints.pooling import Pooling
from kvant.engine import Engine
from kvant.engine.actions import Prefill
from kvant.engine.request import Request
from kvant.errors import CacheError, ContextError, PromptError
from kvant.generation import TransformersDecoder
from kvant.hf import get_model_without_head
from kvant.prefixes import Prefixes

MEAN, LAST = Pooling("mean"), Pooling("last")
LONG = list(range(3, 120)) * 4  # longer than a chunk of the tests below
FAMILIES = ("llama", "gemma3", "bloom", "llama4", "deepseek_v32", "falcon_h1", "mamba", "opt")


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


@torch.no_grad()
def embed_alone(model: Any, tokens: list[int], pooling: Pooling) -> Tensor:
    """Return what transformers' model computes, pooled here."""
    model = get_model_without_head(model)
    rows = model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0].float()
    pooled = rows.mean(0) if pooling.method == "mean" else rows[-1]
    return pooled / pooled.norm() if pooling.normalize else pooled


def limit_chunks(engine: Engine, count: int) -> None:
    """Prefill at most `count` tokens in a forward."""
    engine._worker.scheduler.chunk_sizer.max_chunk = count


@pytest.mark.parametrize("name", FAMILIES)
def test_embedding_equals_that_of_transformers(name: str) -> None:
    model, prompts = build(name), make_prompts(4, longest=60)
    with make_engine(model, max_sequences=2) as engine:
        futures = [(p, m, engine.embed(p, m)) for p in prompts for m in (MEAN, LAST)]
        for prompt, pooling, future in futures:
            expected = embed_alone(model, prompt, pooling)
            assert torch.allclose(future.result(60), expected, rtol=1e-4, atol=1e-5)
            assert len(expected) == engine.embedding_width
            assert future.outcome == "finished" and future.usage.total_tokens == len(prompt)
        wait_until_idle(engine)


@pytest.mark.parametrize("chunk", [1, 64, 100, 512])
@pytest.mark.parametrize("pooling", [MEAN, LAST, Pooling("mean", normalize=True)])
def test_chunks_change_nothing(llama: Any, pooling: Pooling, chunk: int) -> None:
    with make_engine(llama) as engine:
        limit_chunks(engine, chunk)
        tokens = LONG if chunk > 1 else LONG[:9]
        embedding = engine.embed(tokens, pooling).result(60)
    assert torch.allclose(embedding, embed_alone(llama, tokens, pooling), rtol=1e-4, atol=1e-5)
    if pooling.normalize:
        assert float(embedding.norm()) == pytest.approx(1)


@pytest.mark.parametrize(("spec", "error"), [("affine8", 0.01), ("affine4,tail=0", 0.2)])
def test_formats_round_only_earlier_chunks(llama: Any, spec: str, error: float) -> None:
    expected = embed_alone(llama, LONG, MEAN)
    with make_engine(llama, spec) as engine:
        assert torch.allclose(engine.embed(LONG, MEAN).result(60), expected, rtol=1e-4, atol=1e-5)
        limit_chunks(engine, 64)
        rounded = engine.embed(LONG, MEAN).result(60)
    assert 0 < float((rounded - expected).norm() / expected.norm()) < error


def test_other_requests_and_embeddings_do_not_change_each_other(llama: Any) -> None:
    prompts = make_prompts(5, seed=3, longest=90)
    with make_engine(llama, max_sequences=3) as engine:
        limit_chunks(engine, 64)
        alone = [engine.submit(p, max_new_tokens=40, ignore_end=True).result() for p in prompts]
        streams = [engine.submit(p, max_new_tokens=40, ignore_end=True) for p in prompts[:3]]
        futures = [engine.embed(LONG, MEAN), engine.embed(prompts[0], LAST)]
        streams += [engine.submit(p, max_new_tokens=40, ignore_end=True) for p in prompts[3:]]
        for future, (tokens, pooling) in zip(
            futures, [(LONG, MEAN), (prompts[0], LAST)], strict=True
        ):
            expected = embed_alone(llama, tokens, pooling)
            assert torch.allclose(future.result(60), expected, rtol=1e-4, atol=1e-5)
        assert [s.result().tokens for s in streams] == [result.tokens for result in alone]
        stats = engine.stats()
        assert (stats["finished"], stats["failed"], stats["cancelled"]) == (12, 0, 0)
        wait_until_idle(engine)


def test_tokens_of_others_arrive_between_the_chunks(llama: Any) -> None:
    with make_engine(llama, chunk_seconds=1e-6) as engine:
        stream = engine.submit([5, 6, 7], max_new_tokens=200, ignore_end=True)
        next(stream)
        counts, before = list[int](), stream.usage.completion_tokens
        future = engine.embed(LONG, MEAN)
        future.add_done_callback(lambda: counts.append(stream.usage.completion_tokens))
        future.result(60)
        stream.cancel()
    assert counts[0] - before > 3  # chunks of 64 tokens, each followed by a decode


def test_no_prefix_is_matched_or_inserted(llama: Any) -> None:
    prefixes = Prefixes("1MiB")
    with prefixes, make_engine(llama, prefixes=prefixes) as engine:
        engine.submit(LONG, max_new_tokens=2, ignore_end=True).result()
        before = prefixes.stats()
        future = engine.embed(LONG, MEAN)
        assert torch.allclose(
            future.result(60), embed_alone(llama, LONG, MEAN), rtol=1e-4, atol=1e-5
        )
        engine.embed(LONG[::-1], MEAN).result(60)
        assert future.usage.cached_tokens == 0 and prefixes.stats() == before
        again = engine.submit(LONG, max_new_tokens=2, ignore_end=True)
        assert again.result().usage.cached_tokens > 0


@pytest.mark.parametrize("overcommit", [1.0, 3.0])
def test_memory_stays_within_its_limit(llama: Any, overcommit: float) -> None:
    """CheckedEngine compares the pools with the limit after each step."""
    prompts = make_prompts(12, seed=5, longest=300)
    with make_engine(
        llama, "affine8", max_bytes="640KiB", max_sequences=4, overcommit=overcommit
    ) as engine:
        limit_chunks(engine, 64)
        streams = [engine.submit(p, max_new_tokens=60, ignore_end=True) for p in prompts[:6]]
        futures = [engine.embed(prompt, MEAN) for prompt in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            expected = embed_alone(llama, prompt, MEAN)
            error = (future.result(60) - expected).norm() / expected.norm()
            assert float(error) < 0.02
        assert all(len(stream.result(60).tokens) == 60 for stream in streams)
        assert any(future.timeline.num_swaps for future in futures) == (overcommit > 1)
        wait_until_idle(engine)


def test_embedding_keeps_no_other_hidden_states(llama: Any) -> None:
    with make_engine(llama) as engine:
        embedding = engine.embed(LONG, LAST).result(60)
    assert embedding.untyped_storage().nbytes() == embedding.nbytes == 4 * len(embedding)


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4,window=100,sinks=4"])
@pytest.mark.parametrize("length", [257, 320])
def test_an_embedding_fits_in_what_is_reserved_for_it(llama: Any, spec: str, length: int) -> None:
    """A page more or less than its tokens need would break the limit, or be refused."""
    request = Request(0, length, 0)
    with make_engine(llama, spec) as engine:
        budget = engine._worker.scheduler.memory_budget
        memory_model, peak = budget.memory_model, budget.count_peak(request)
        assert (peak == memory_model.count_slots(length)).all()
        transient = memory_model.count_transient_slots(request.num_prompt_tokens)
        need = memory_model.compute_nbytes(peak + transient)
    with make_engine(llama, spec, max_bytes=need) as engine:
        assert engine.embed(LONG[:length], MEAN).result(60).isfinite().all()
    with (
        make_engine(llama, spec, max_bytes=need - 1) as engine,
        pytest.raises(ContextError, match="use a smaller format"),
    ):
        engine.embed(LONG[:length], MEAN)


def test_a_cancel_ends_the_request_between_chunks(llama: Any) -> None:
    with make_engine(llama) as engine:
        limit_chunks(engine, 64)
        perform, chunks, submitted = engine._worker._perform, list[Prefill](), threading.Event()

        def cancel_after_a_chunk(action: Any) -> None:
            perform(action)
            if isinstance(action, Prefill):
                chunks.append(action)
                submitted.wait(60)
                future.cancel()

        engine._worker._perform = cancel_after_a_chunk  # type: ignore[method-assign]
        future = engine.embed(LONG, MEAN)
        submitted.set()
        with pytest.raises(CacheError, match="cancelled before its embedding"):
            future.result(60)
        assert future.outcome == "cancelled" and len(chunks) == 1
        wait_until_idle(engine)


def test_an_event_loop_waits_without_a_thread(llama: Any) -> None:
    async def embed(engine: Engine) -> list[Tensor]:
        return list(await asyncio.gather(*(engine.embed(p, LAST) for p in make_prompts(5))))

    with make_engine(llama) as engine:
        embeddings = asyncio.run(embed(engine))
    for prompt, embedding in zip(make_prompts(5), embeddings, strict=True):
        expected = embed_alone(llama, prompt, LAST)
        assert torch.allclose(embedding, expected, rtol=1e-4, atol=1e-5)


def test_the_whole_context_may_be_embedded(llama: Any) -> None:
    with make_engine(llama, max_context=40) as engine:
        assert engine.embed(LONG[:40], MEAN).result(60).shape == (64,)
        with pytest.raises(ContextError, match="41 tokens for a context of 40"):
            engine.embed(LONG[:41], MEAN)
        with pytest.raises(ContextError):  # a reply needs a place for its token
            engine.submit(LONG[:40])


def test_invalid_requests_are_refused(llama: Any) -> None:
    with make_engine(llama, "affine8", max_bytes="256KiB") as engine:
        with pytest.raises(PromptError, match="no tokens"):
            engine.embed([], MEAN)
        with pytest.raises(PromptError, match="has token 128"):
            engine.embed([128], MEAN)
        with pytest.raises(ContextError, match=r"400 tokens need .* of a limit"):
            engine.embed(LONG[:400], MEAN)
        with pytest.raises(ValueError, match="allowed are mean, last"):
            engine.embed([5], Pooling("cls"))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="priority='high'"):
            engine.embed([5], MEAN, priority="high")  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="closed"):
        engine.embed([5], MEAN)


def test_a_bidirectional_model_is_refused() -> None:
    model = build("llama")
    model.config.is_causal = False
    with make_engine(model) as engine, pytest.raises(ValueError, match="bidirectional attention"):
        engine.embed([5, 6], MEAN)


def test_a_failed_forward_ends_its_request_only(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = TransformersDecoder.compute_hidden_states

    def fail_for_seven(self: Any, ids: list[int], cache: Any) -> Tensor:
        rows = compute(self, ids, cache)
        if 7 in ids:
            raise RuntimeError("no seven")
        return rows * torch.nan if 8 in ids else rows

    monkeypatch.setattr(TransformersDecoder, "compute_hidden_states", fail_for_seven)
    with make_engine(llama) as engine:
        futures = [engine.embed([5, number], MEAN) for number in (6, 7, 8, 9)]
        for future, message in zip(futures[1:3], ["no seven", "not finite"], strict=True):
            with pytest.raises((RuntimeError, CacheError), match=message):
                future.result(60)
            assert future.outcome == "failed"
        for future, number in ((futures[0], 6), (futures[3], 9)):
            expected = embed_alone(llama, [5, number], MEAN)
            assert torch.allclose(future.result(60), expected, rtol=1e-4, atol=1e-5)
        assert engine.stats()["failed"] == 2
        wait_until_idle(engine)


def test_closing_cancels_open_requests(llama: Any) -> None:
    engine = make_engine(llama)
    engine._worker._perform = lambda action: time.sleep(0.01)  # type: ignore[method-assign]
    future = engine.embed(LONG, MEAN)
    engine.close()
    assert future.outcome == "cancelled"
