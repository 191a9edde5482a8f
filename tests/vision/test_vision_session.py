"""Test images in `generate`, sessions, `kvant chat` and loaded checkpoints."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import kvant
from generation.speakers import Numbers
from hf.zoo import build
from kvant import Messages, Prefixes, Session, checkpoints
from kvant.errors import CacheError, PromptError
from vision.test_vision_engine import NUM_NEW, TEXT, generate_with_transformers, make_messages
from vision.tiny import FAMILIES, TinyVision, encode_image, make_image

OPTIONS: dict[str, Any] = {"max_new_tokens": NUM_NEW, "ignore_end": True}


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_generate_equals_transformers(
    family: TinyVision, chunk: int, draft: str | None, every_draft_is_verified: None
) -> None:
    prompt = ("a" * 30, make_image(1), " or ", make_image(2), "?")
    steps = kvant.generate(
        family.model,
        family.processor,
        make_messages(*prompt),
        prefill_chunk=chunk,
        draft=draft,
        **OPTIONS,
    )
    tokens = tuple(step.token for step in steps)
    assert tokens == generate_with_transformers(family, *prompt)


@pytest.mark.parametrize("prefixes", [None, "1GiB"])
def test_session_with_images_equals_its_messages(family: TinyVision, prefixes: str | None) -> None:
    shared = None if prefixes is None else Prefixes(prefixes)
    session = Session(family.model, family.processor, prefixes=shared)
    messages: list[Any] = []
    for images, text in (([1], TEXT), ([], "And what else?"), ([2, 1], "Compare them.")):
        sources = [make_image(number) for number in images]
        reply = "".join(step.text for step in session.send(text, images=sources, **OPTIONS))
        messages.append(
            make_messages(*sources, text)[0] if sources else {"role": "user", "content": text}
        )
        alone = kvant.generate(family.model, family.processor, Messages(messages), **OPTIONS)
        assert reply == "".join(step.text for step in alone)
        messages.append({"role": "assistant", "content": reply})
    stats = session.stats()
    assert stats["tokens_reused"] > stats["tokens_asked"] / 4
    fork = session.fork()
    for other, number in ((session, 5), (fork, 6), (session, 7)):
        other.rewind(other.turns[1].end - 2)  # within a reply, after the first image
        image = make_image(number)
        steps = other.send("Now this.", images=[image], **OPTIONS)
        reply = "".join(step.text for step in steps)
        turns = other.turns[:2]
        again = [*messages[:3], {"role": "assistant", "content": turns[1].reply}]
        again += make_messages(image, "Now this.")
        alone = kvant.generate(family.model, family.processor, Messages(again), **OPTIONS)
        assert reply == "".join(step.text for step in alone)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_prompts_that_begin_with_an_image_use_a_store(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]()
    family.processor.tokenizer.chat_template = family.processor.tokenizer.chat_template.replace(
        "{{ message.role }}:", ""
    )
    tokens = []
    for _ in range(2):
        prefixes = Prefixes(store=str(tmp_path))
        session = Session(family.model, family.processor, prefixes=prefixes)
        steps = session.send("What? " * 20, images=[make_image(1)], **OPTIONS)
        tokens.append([step.token for step in steps])
        prefixes.close()
    assert tokens[0] == tokens[1]


def test_another_image_of_the_same_size_is_read_again(family: TinyVision) -> None:
    session = Session(family.model, family.processor)
    replies = []
    for number in (1, 2):
        steps = session.send("What?", images=[make_image(number)], **OPTIONS)
        replies.append(tuple(step.token for step in steps))
        session.rewind(0)
    parts = [(make_image(number), "What?") for number in (1, 2)]
    assert replies == [generate_with_transformers(family, *part) for part in parts]


def test_sessions_refuse_what_cannot_be_right(llava: TinyVision, tmp_path: Path) -> None:
    session = Session(llava.model, llava.processor)
    list(session.send("What?", images=[make_image(1)], **OPTIONS))
    with pytest.raises(CacheError, match="a conversation with images cannot be saved"):
        session.save(tmp_path / "a.kvant")
    session.rewind(0)
    session.save(tmp_path / "a.kvant")
    with pytest.raises(PromptError, match="a message as text, and a model with a chat template"):
        session.send([3, 4], images=[make_image(1)])
    with pytest.raises(PromptError, match="strategy=disabled or long"):
        Session(llava.model, llava.processor, strategy="disabled").send("a", images=[make_image(1)])
    exact = Session(
        FAMILIES["gemma3"]().model, FAMILIES["gemma3"]().processor, prefixes=Prefixes(exact=True)
    )
    with pytest.raises(PromptError, match="with exact prefixes"):
        exact.send("a", images=[make_image(1)])
    with pytest.raises(PromptError, match="its score repeats the prompt as text"):
        Session(llava.model, llava.processor, "raw,prune=kvzip:25%").send(
            "a", images=[make_image(1)]
        )
    with pytest.raises(PromptError, match="of type llama: images are supported"):
        list(kvant.generate(build("llama"), Numbers(), make_messages(make_image(1))))


@pytest.mark.parametrize("name", ["llava", "gemma3"])  # processors of others need torchvision
def test_checkpoints_are_loaded_with_their_processor(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]()
    family.model.save_pretrained(tmp_path)
    family.processor.save_pretrained(tmp_path)
    model, tokenizer = checkpoints.load(str(tmp_path), dtype="float32")
    processor = checkpoints.load_processor(str(tmp_path), model, tokenizer)
    prompt = ("What is ", make_image(1), "?")
    steps = kvant.generate(model, processor, make_messages(*prompt), **OPTIONS)
    assert tuple(step.token for step in steps) == generate_with_transformers(family, *prompt)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="the processor can be loaded")
def test_missing_processors_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = FAMILIES["qwen3_vl"]()
    family.model.save_pretrained(tmp_path)
    family.processor.tokenizer.save_pretrained(tmp_path)
    family.processor.image_processor.save_pretrained(tmp_path)
    model, tokenizer = checkpoints.load(str(tmp_path))
    assert checkpoints.load_processor(str(tmp_path), model, tokenizer) is tokenizer
    assert "requires the Torchvision library" in caplog.text
    assert "pip install 'kvant[vision]'" in caplog.text


def test_chat_command_reads_images(call: Any, llava: TinyVision, tmp_path: Path) -> None:
    folder, file = tmp_path / "model", tmp_path / "a.png"
    llava.model.save_pretrained(folder)
    llava.processor.save_pretrained(folder)
    file.write_bytes(encode_image(make_image(1)))
    lines = f"/image {tmp_path}/none.png\n/image {folder}/config.json\n/image {file}\nWhat?\n"
    options = ["--model", str(folder), "--dtype", "float32", "--max-new-tokens", "8"]
    code, out, error = call("chat", *options, typed=lines)
    session = Session(llava.model, llava.processor)
    steps = session.send("What?", images=[make_image(1)], max_new_tokens=8)
    assert code == 0 and "".join(step.text for step in steps).strip() in out
    assert "none.png" in error and "not PNG, JPEG, WebP or GIF" in error
    assert "1 image of 36 tokens with the next message" in error


def test_plain_models_refuse_images_in_chat(tmp_path: Path) -> None:
    torch.manual_seed(0)
    session = Session(*checkpoints.load(None))
    with pytest.raises(PromptError, match="images"):
        session.process_images([make_image(1)])
