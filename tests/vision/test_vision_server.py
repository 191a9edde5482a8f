"""Test images in requests of real clients, and files that are refused."""

from __future__ import annotations

import base64
import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest

pytest.importorskip("fastapi", reason="pip install 'kvant[server]'")

from kvant import Engine
from kvant.errors import PromptError
from kvant.vision import read_image
from kvant.vision.image_file import MAX_FILE_BYTES
from server.conftest import serve_model
from vision.hostile import FORMATS, list_hostile_files
from vision.test_vision_engine import make_messages
from vision.tiny import FAMILIES, Image, TinyVision, encode_image, make_image

NUM_NEW = 10
QUESTION = " What is in this image?"
FILES = list_hostile_files()


@pytest.fixture(scope="module")
def family() -> TinyVision:
    return FAMILIES["qwen2_5_vl"]()


@pytest.fixture(scope="module")
def served(family: TinyVision) -> Iterator[tuple[Any, str]]:
    options = {"pack": False, "max_bytes": "64MiB", "max_sequences": 4}
    with serve_model(family.model, family.processor, **options) as service:
        yield service


@pytest.fixture(scope="module")
def replies(family: TinyVision) -> list[str]:
    """The texts that an engine generates for images 1 and 2."""
    with Engine(family.model, family.processor, "affine8", pack=False) as engine:
        streams = [
            engine.submit(
                make_messages(make_image(n), QUESTION),
                max_new_tokens=NUM_NEW,
                skip_special_tokens=False,
            )
            for n in (1, 2)
        ]
        texts = [stream.result().text for stream in streams]
    assert texts[0] != texts[1]
    return texts


def encode(number: int, file_format: str = "PNG") -> str:
    return base64.b64encode(encode_image(make_image(number), file_format)).decode()


def make_url(number: int) -> str:
    return f"data:image/png;base64,{encode(number)}"


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_of_openai(
    served: Any, replies: list[str], number: int, stream: bool
) -> None:
    openai = pytest.importorskip("openai")
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": make_url(number), "detail": "auto"}},
        {"type": "text", "text": QUESTION},
    ]
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="inside",
            messages=[{"role": "user", "content": parts}],
            max_tokens=NUM_NEW,
            temperature=0,
            stream=stream,
        )
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        else:
            text = reply.choices[0].message.content
    assert text == replies[number - 1]


@pytest.mark.parametrize("number", [1, 2])
def test_responses_of_openai(served: Any, replies: list[str], number: int) -> None:
    openai = pytest.importorskip("openai")
    content: list[Any] = [
        {"type": "input_image", "image_url": make_url(number), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0) as client:
        reply = client.responses.create(
            model="inside",
            input=[{"role": "user", "content": content}],
            max_output_tokens=16,
            temperature=0,
        )
    assert reply.output_text.startswith(replies[number - 1])


@pytest.mark.parametrize("number", [1, 2])
def test_messages_of_anthropic(served: Any, replies: list[str], number: int) -> None:
    anthropic = pytest.importorskip("anthropic")
    source = {"type": "base64", "media_type": "image/png", "data": encode(number)}
    content: list[Any] = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    options: dict[str, Any] = {"model": "inside", "max_tokens": NUM_NEW}
    options["messages"] = [{"role": "user", "content": content}]
    options["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=served[1], api_key="none", max_retries=0) as client:
        assert client.messages.create(**options).content[0].text == replies[number - 1]
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == replies[number - 1]
        del options["max_tokens"], options["extra_body"]
        count = client.messages.count_tokens(**options)
    assert count.input_tokens > 30 + len(QUESTION)


def test_images_in_results_of_tools_follow_them(served: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encode(1)}
    body = {
        "model": "inside",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "Take a screenshot."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "shot", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [
                            {"type": "text", "text": "Done."},
                            {"type": "image", "source": source},
                        ],
                    }
                ],
            },
        ],
        "tools": [{"name": "shot", "input_schema": {"type": "object", "properties": {}}}],
    }
    count = httpx2.post(f"{served[1]}/v1/messages/count_tokens", json=without_limit(body))
    assert count.status_code == 200, count.text
    with_image = count.json()["input_tokens"]
    del body["messages"][2]["content"][0]["content"][1]  # type: ignore[index]
    count = httpx2.post(f"{served[1]}/v1/messages/count_tokens", json=without_limit(body))
    assert with_image - count.json()["input_tokens"] > 30


def without_limit(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


@pytest.mark.parametrize("number", [1, 2])
def test_ollama(served: Any, replies: list[str], number: int) -> None:
    ollama = pytest.importorskip("ollama")
    image, options = encode_image(make_image(number)), {"temperature": 0, "num_predict": NUM_NEW}
    message = {"role": "user", "content": QUESTION, "images": [image]}
    with ollama.Client(host=served[1]) as client:
        reply = client.chat("inside", [message], options=options)
        assert reply.message.content == replies[number - 1]
        lines = client.chat("inside", [message], options=options, stream=True)
        assert "".join(line.message.content for line in lines) == replies[number - 1]
        generated = client.generate("inside", QUESTION, images=[image], options=options)
        assert generated.response == replies[number - 1]
        assert "vision" in client.show("inside").capabilities


def test_second_turn_reads_no_image_again(served: Any) -> None:
    _, url = served
    body: dict[str, Any] = {"max_tokens": 6, "temperature": 0}
    part = {"type": "image_url", "image_url": {"url": make_url(7)}}
    messages: list[Any] = [
        {"role": "user", "content": [part, {"type": "text", "text": "Look " * 20}]}
    ]
    first = httpx2.post(f"{url}/v1/chat/completions", json=body | {"messages": messages}).json()
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And?"}]
    second = httpx2.post(f"{url}/v1/chat/completions", json=body | {"messages": messages}).json()
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"] - 64


@pytest.mark.parametrize("file", [file for _, file in FILES], ids=[name for name, _ in FILES])
def test_hostile_files_are_refused(file: bytes) -> None:
    with pytest.raises(PromptError) as caught:
        read_image(file)
    assert len(str(caught.value)) < 400


def test_hostile_files_are_bad_requests_and_leave_no_memory(served: Any) -> None:
    assert len(FILES) >= 60
    process, sizes = psutil.Process(), list[int]()
    with httpx2.Client(timeout=60) as client:
        for _ in range(3):
            for name, file in FILES:
                if len(file) > MAX_FILE_BYTES:
                    continue
                data = base64.b64encode(file).decode()
                part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
                body = {"messages": [{"role": "user", "content": [part]}]}
                reply = client.post(f"{served[1]}/v1/chat/completions", json=body)
                assert reply.status_code == 400, name
                assert reply.json()["error"]["type"] == "invalid_request_error", name
            gc.collect()
            sizes.append(process.memory_info().rss)
    assert sizes[2] - sizes[1] < 8 << 20


MEASURE_PEAK = """
import resource, sys
sys.path.insert(0, "tests")
from vision.hostile import list_hostile_files
from kvant.errors import PromptError
from kvant.vision import read_image
files = list_hostile_files()
def measure(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_image(__import__("vision.tiny").tiny.encode_image(__import__("vision.tiny").tiny.make_image(1)))
for name, file in files:
    before = measure()
    try: read_image(file)
    except PromptError: pass
    else: print("read", name)
    if measure() - before > 48 << 10: print(name, measure() - before, "KiB")
"""


def test_hostile_files_allocate_little() -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE_PEAK], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_transparent_and_deep_images_keep_their_looks() -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((1, 1), (0, 0, 0, 255))
    image = read_image(encode_image(clear))
    assert image.getpixel((0, 0)) == (255, 255, 255) and image.getpixel((1, 1)) == (0, 0, 0)
    deep = Image.fromarray(np.full((4, 4), 30_000, np.uint16))
    assert read_image(encode_image(deep)).getpixel((0, 0)) == (117, 117, 117)


def test_many_large_images_are_refused_before_they_are_processed(served: Any) -> None:
    file = encode_image(Image.new("1", (6000, 6000)))
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}
        for name in [base64.b64encode(file + bytes(n)).decode() for n in range(6)]
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    reply = httpx2.post(f"{served[1]}/v1/chat/completions", json=body, timeout=120)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and "of 144,000,000 for all of a prompt" in message


@pytest.mark.parametrize("file_format", FORMATS)
def test_four_formats_are_read(file_format: str) -> None:
    image = read_image(encode_image(make_image(1), file_format))
    assert image.size == (48, 40) and image.mode == "RGB"


def test_context_of_token_ids_has_no_images(served: Any) -> None:
    """Regression: pixels were dropped, and the placeholders read as text."""
    body: dict[str, Any] = {"model": "inside", "prompt": "What is it?", "stream": False}
    body["options"] = {"num_predict": 2}
    seen = httpx2.post(f"{served[1]}/api/generate", json=body | {"images": [encode(1)]}).json()
    images, context = {"images": [encode(1)], "context": [1]}, {"context": seen["context"]}
    for fields, message in ((images, "context: not with images"), (context, "tokens of images")):
        reply = httpx2.post(f"{served[1]}/api/generate", json=body | fields)
        assert reply.status_code == 400 and message in reply.json()["error"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/a.png", "no URL is fetched"),
        ("file:///etc/passwd", "no URL is fetched"),
        ("data:text/html;base64,AAAA", "only data URLs are read"),
        ("data:image/png,AAAA", "needs base64"),
        ("data:image/png;base64,!!", "not valid base64"),
    ],
)
def test_urls_are_not_fetched(served: Any, url: str, message: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    reply = httpx2.post(f"{served[1]}/v1/chat/completions", json=body)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_models_of_text_refuse_images(running: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": make_url(1)}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    reply = httpx2.post(f"{running[1]}/v1/chat/completions", json=body)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and "images are supported for models of type" in message
