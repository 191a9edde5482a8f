"""Test images in the engine: each request gets what it would get alone, and prefixes hit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from engine.test_engine import CheckedEngine
from generation.speakers import Numbers
from hf.zoo import build
from kvant import Engine, Messages, Prefixes
from kvant.checkpoints.pooling import Pooling
from kvant.engine.request import Request, Sequence
from kvant.errors import ContextError, PromptError
from kvant.generation.images import PromptImages
from kvant.prefixes.memory import PrefixPools
from kvant.vision import VisionModel
from kvant.vision.prompt import FIRST_IMAGE_HASH
from vision.tiny import FAMILIES, TinyVision, encode_image, make_image

NUM_NEW = 8
IMAGE_TOKEN = 2  # of the tokenizer of all families
TEXT = "Some text before the image. "


def make_messages(*parts: Any) -> list[dict[str, Any]]:
    """Make one message of texts and images."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def generate_with_transformers(family: TinyVision, *parts: Any) -> tuple[int, ...]:
    """Return the tokens that transformers generates, with a cache of its own."""
    images = [part for part in parts if not isinstance(part, str)]
    processor = family.processor
    text = processor.tokenizer.apply_chat_template(
        make_messages(*parts), tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt")
    with torch.no_grad():
        tokens = family.model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    return tuple(tokens[0, inputs["input_ids"].shape[1] :].tolist())


def make_engine(family: TinyVision, spec: str = "raw", **options: Any) -> Engine:
    options = {"pack": False, "chunk_seconds": 60} | options
    return CheckedEngine(family.model, family.processor, spec, **options)


def submit(engine: Engine, *parts: Any, **options: Any) -> Any:
    options = {"max_new_tokens": NUM_NEW, "temperature": 0} | options
    return engine.submit(make_messages(*parts), ignore_end=True, **options)


def count_tokens(engine: Engine, *parts: Any) -> list[int]:
    return engine.encode_prompt(make_messages(*parts))


PROMPTS = [
    ("What is ", make_image(1), "?"),
    ("Hello.",),
    (make_image(2, 100, 20), " or ", make_image(3), " or this: ", make_image(1), "? Say it."),
    ("First some longer text, which is more than a page of sixty-four tokens. ", make_image(4)),
]


@pytest.mark.parametrize("chunk_seconds", [60, 1e-9], ids=["whole", "chunked"])
def test_engine_equals_transformers(family: TinyVision, chunk_seconds: float) -> None:
    alone = [generate_with_transformers(family, *prompt) for prompt in PROMPTS]
    assert alone[0] != generate_with_transformers(family, "What is ", make_image(9), "?")
    with make_engine(family, chunk_seconds=chunk_seconds) as engine:
        streams = [submit(engine, *prompt) for prompt in PROMPTS]
        cancelled = submit(engine, *PROMPTS[2], max_new_tokens=200)
        twins = submit(engine, *PROMPTS[0], n=2)
        cancelled.cancel()
        assert [stream.result().tokens for stream in streams] == alone
        assert [twin.tokens for twin in twins.results()] == [alone[0], alone[0]]


def test_drafts_and_swaps_change_nothing(family: TinyVision, every_draft_is_verified: None) -> None:
    alone = [generate_with_transformers(family, *prompt) for prompt in PROMPTS]
    need = max(plan_nbytes(family, prompt) for prompt in PROMPTS)
    with make_engine(
        family, max_bytes=2 * need, overcommit=4, draft="ngram", chunk_seconds=1e-9
    ) as engine:
        streams = [submit(engine, *prompt) for prompt in PROMPTS * 2]
        assert [stream.result().tokens for stream in streams] == alone * 2


def plan_nbytes(family: TinyVision, prompt: tuple[Any, ...]) -> int:
    """Return the bytes that an engine needs for one prompt."""
    with make_engine(family) as engine:
        num_tokens = len(count_tokens(engine, *prompt)) + NUM_NEW
        model = engine.vision_model
        assert model is not None
        planned = kvant.plan(family.model, "raw", context=num_tokens + 512)
        return planned.nbytes + num_tokens * model.token_nbytes


@pytest.mark.parametrize("spec", ["raw", "affine8", "raw,window=48,sinks=4"])
def test_same_image_hits_and_another_one_does_not(family: TinyVision, spec: str) -> None:
    question = " What is it?"
    with make_engine(family, spec, prefixes=Prefixes()) as engine:
        first = submit(engine, TEXT, make_image(1), question).result()
        again = submit(engine, TEXT, make_image(1), question).result()
        other = submit(engine, TEXT, make_image(2), question).result()
        tokens = count_tokens(engine, TEXT, make_image(1), question)
    with make_engine(family, spec) as engine:
        other_alone = submit(engine, TEXT, make_image(2), question).result()
    assert again.tokens == first.tokens and other.tokens == other_alone.tokens
    assert other.usage.cached_tokens <= tokens.index(IMAGE_TOKEN)
    if "window" not in spec:
        assert again.usage.cached_tokens >= len(tokens) - 64 - NUM_NEW * (spec != "raw")


def test_second_turn_continues_the_first(family: TinyVision) -> None:
    first = make_messages(TEXT, make_image(1), " What is it?")
    with make_engine(family, prefixes=Prefixes()) as engine:
        reply = engine.submit(first, max_new_tokens=NUM_NEW, ignore_end=True).result()
        second = [*first, {"role": "assistant", "content": reply.text}]
        second += [{"role": "user", "content": "And then?"}]
        result = engine.submit(second, max_new_tokens=NUM_NEW, ignore_end=True).result()
        num_first = len(engine.encode_prompt(first))
    with make_engine(family) as engine:
        alone = engine.submit(second, max_new_tokens=NUM_NEW, ignore_end=True).result()
    assert result.tokens == alone.tokens
    assert result.usage.cached_tokens >= num_first - 64


def test_images_hit_after_a_restart(
    family: TinyVision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # prefilling is never faster
    monkeypatch.setattr(PrefixPools, "record_prefill_time", lambda *args: None)
    prompt = (TEXT * 3, make_image(1), " What is it?")
    with make_engine(family, store=str(tmp_path)) as engine:
        first = submit(engine, *prompt).result()
        num_tokens = len(count_tokens(engine, *prompt))
        prefixes = engine.prefixes
        assert prefixes is not None and prefixes.flush(60)
    with make_engine(family, store=str(tmp_path)) as engine:
        again = submit(engine, *prompt).result()
        other = submit(engine, TEXT * 3, make_image(2), " What is it?").result()
        number = count_tokens(engine, *prompt).index(IMAGE_TOKEN)
    assert again.tokens == first.tokens != other.tokens
    assert again.usage.restored_tokens >= num_tokens - 64
    assert other.usage.restored_tokens <= number


def test_features_are_computed_once_and_counted(
    llava: TinyVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, compute = list[bytes](), VisionModel.compute_features

    def count(self: VisionModel, image: Any) -> Any:
        encoded.append(image.digest)
        return compute(self, image)

    monkeypatch.setattr(VisionModel, "compute_features", count)
    with make_engine(llava, prefixes=Prefixes(), chunk_seconds=1e-9) as engine:
        for _ in range(2):
            submit(engine, make_image(1), "a", make_image(1), "b" * 70, n=2).results()
        pools = engine._worker.prefix_reuse._namespace.pools  # type: ignore[union-attr]
        assert pools.count_image_tokens() == 36 and engine.vision_model is not None
        before = pools.measure().nbytes
        for entry in pools:
            entry.features = {}
        assert before - pools.measure().nbytes == 36 * engine.vision_model.token_nbytes
    assert len(encoded) == 1


def test_same_tokens_of_other_images_share_no_key(llava: TinyVision) -> None:
    with make_engine(llava) as engine:
        prompts = [
            engine._image_reader.process_images(make_messages(make_image(seed)))
            for seed in (1, 1, 2)
        ]
        located = [
            engine._image_reader.locate_images(prompt, engine.encode_prompt(prompt))
            for prompt in prompts
        ]
        keys = [
            images.layout.make_prefix_tokens(engine.encode_prompt(prompt))
            for images, prompt in zip(located, prompts, strict=True)
            if images is not None
        ]
    assert keys[0] == keys[1]
    hashed = [token for token in keys[0] if token >= FIRST_IMAGE_HASH]
    assert len({*hashed}) == 36 and not {*hashed} & {*keys[2]}


def test_ended_request_keeps_no_image(llava: TinyVision) -> None:
    """The last action keeps it alive until the next one."""
    with make_engine(llava) as engine:
        prompt = engine._image_reader.process_images(make_messages(make_image(1)))
        images = engine._image_reader.locate_images(prompt, engine.encode_prompt(prompt))
    assert images is not None
    request = Request(0, 9, 1, images=images, layout=images.layout, run_chunk=images.run_chunk)
    request.sequences = [Sequence([], layout=images.layout)]
    references = [weakref.ref(images), weakref.ref(images.layout)]
    del images
    request.free()
    assert [reference() for reference in references] == [None, None]


def test_bidirectional_images_are_not_split() -> None:
    family = FAMILIES["gemma3"]()
    chunks, run = list[tuple[int, int]](), PromptImages.run_chunk

    def record(self: Any, decoder: Any, ids: list[int], cache: Any) -> Any:
        chunks.append((cache.length, cache.length + len(ids)))
        return run(self, decoder, ids, cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptImages, "run_chunk", record)
        with make_engine(family, prefixes=Prefixes(), chunk_seconds=1e-9) as engine:
            running = engine.submit("a", max_new_tokens=300, ignore_end=True)  # so chunks are short
            parts = "a" * 50, make_image(1), "b" * 100, make_image(2), "c" * 30
            tokens = count_tokens(engine, *parts)
            submit(engine, *parts).result()
            running.cancel()
    inside = {
        index
        for index in range(1, len(tokens))
        if tokens[index - 1] == tokens[index] == IMAGE_TOKEN
    }
    ends = {end for _, end in chunks}
    assert len(chunks) > 2 and not ends & inside


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image"}], "without the field 'image'"),
        ([{"type": "image", "image": 3}], "of type int"),
        ([{"type": "image", "image": b"GIF"}], "not PNG, JPEG, WebP or GIF, or is corrupt"),
        ([{"type": "image_url", "image_url": {"url": "http://a/b.png"}}], "no URL is fetched"),
        (
            [{"type": "image", "image": make_image(1)}] * 65,
            "65 images in a prompt: at most 64 are allowed; drop some",
        ),
        (
            [{"type": "image", "image": make_image(1)}, {"type": "text", "text": "<image>"}],
            "'<image>' 2 times: text must not contain it",
        ),
    ],
)
def test_wrong_images_are_refused(llava: TinyVision, content: Any, message: str) -> None:
    with make_engine(llava) as engine, pytest.raises(PromptError, match=message):
        engine.submit([{"role": "user", "content": content}])


def test_models_without_images_refuse_them(llava: TinyVision) -> None:
    prompt = make_messages("a", make_image(1))
    refusals = [
        (Engine(build("llama"), Numbers()), "of type llama: images are supported for .*llava"),
        (Engine(llava.model, llava.processor.tokenizer), r"without its processor: .*AutoProcessor"),
        (make_engine(llava, "raw,prune=kvzip:25%"), "its score repeats the prompt as text"),
        (
            make_engine(FAMILIES["gemma3"](), prefixes=Prefixes(exact=True)),
            r"exact prefixes: .*use exact=False",
        ),
    ]
    for engine, message in refusals:
        with engine, pytest.raises(PromptError, match=message):
            engine.submit(prompt)


def test_images_are_not_embedded(llava: TinyVision) -> None:
    with make_engine(llava) as engine, pytest.raises(PromptError, match="only text is embedded"):
        engine.embed(make_messages(make_image(1)), Pooling("last"))


@pytest.mark.parametrize(
    "make_part",
    [
        lambda image: {"type": "image", "image": encode_image(image)},
        lambda image: {"type": "image_url", "image_url": {"url": make_data_url(image)}},
        lambda image: {"type": "image_url", "image_url": make_data_url(image)},
    ],
)
def test_files_and_data_urls_are_images(
    llava: TinyVision, make_part: Callable[[Any], dict[str, Any]]
) -> None:
    expected = generate_with_transformers(llava, make_image(1), " What?")
    content = [make_part(make_image(1)), {"type": "text", "text": " What?"}]
    with make_engine(llava) as engine:
        prompt = Messages([{"role": "user", "content": content}])
        stream = engine.submit(prompt, max_new_tokens=NUM_NEW, ignore_end=True)
        assert stream.result().tokens == expected


def make_data_url(image: Any) -> str:
    import base64

    return "data:image/png;base64," + base64.b64encode(encode_image(image)).decode()


def test_hooks_that_capture_hidden_states_disable_nothing(llava: TinyVision) -> None:
    """transformers leaves them on a model once its hidden states were requested."""
    model = build("llama")
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    prefixes = Prefixes()
    with Engine(model, Numbers(), "raw", pack=False, prefixes=prefixes) as engine:
        prompt = list(range(3, 90))
        engine.submit(prompt, max_new_tokens=12, ignore_end=True).result()
        result = engine.submit(prompt, max_new_tokens=12, ignore_end=True).result()
    assert result.usage.cached_tokens


def test_failed_encodings_end_their_request_alone(
    llava: TinyVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, broken = VisionModel.compute_features, make_image(5)

    def fail(self: VisionModel, image: Any) -> Any:
        if image.digest == self.processor.process(broken).digest:
            raise RuntimeError("the encoder died")
        return compute(self, image)

    monkeypatch.setattr(VisionModel, "compute_features", fail)
    with make_engine(llava, prefixes=Prefixes()) as engine:
        failing = submit(engine, TEXT, broken)
        others = [submit(engine, *prompt) for prompt in PROMPTS[:2]]
        with pytest.raises(RuntimeError, match="the encoder died"):
            failing.result()
        alone = [generate_with_transformers(llava, *prompt) for prompt in PROMPTS[:2]]
        assert [stream.result().tokens for stream in others] == alone


def test_features_count_towards_the_limit_of_bytes(
    llava: TinyVision, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = plan_nbytes(llava, PROMPTS[0])
    with make_engine(llava, max_bytes=limit) as engine:
        submit(engine, *PROMPTS[0]).result()
    monkeypatch.setattr(VisionModel, "token_nbytes", limit // 36)
    with make_engine(llava, max_bytes=limit) as engine:
        submit(engine, "Hello.").result()
        with pytest.raises(ContextError, match=r"need .* of a limit of"):
            submit(engine, *PROMPTS[0])
