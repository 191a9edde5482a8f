"""Test embeddings with OpenAI's and Ollama's clients against a running server."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from kvant import demo
from kvant.checkpoints.pooling import DeclaredPooling, Pooling
from kvant.engine import EmbeddingFuture
from kvant.generation.conversation import encode_truncated
from kvant.prefixes import Prefixes
from kvant.server import ApiKeys, ServerSettings, Service, open_service
from kvant.server.service import MAX_OPEN_INPUTS
from server.conftest import post_and_leave, serve_model

openai, ollama = pytest.importorskip("openai"), pytest.importorskip("ollama")
httpx = pytest.importorskip("httpx2")

TEXTS = ["import os\n", "def read(path):\n    return 1\n" * 9, "class Tree:\n"]
OPTIONS: dict[str, Any] = {"max_sequences": 4, "max_bytes": "64MiB", "max_context": 128}
OPTIONS |= {"pack": False}
MEAN, UNIT_LAST = Pooling("mean"), Pooling("last", normalize=True)


@pytest.fixture(scope="module")
def url(bundled_model: tuple[Any, Any]) -> Iterator[str]:
    """Yield the address of a server whose model declares the mean, not normalized."""
    with serve_model(*bundled_model, declared_pooling=DeclaredPooling(MEAN), **OPTIONS) as (_, url):
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def ollama_client(url: str) -> Iterator[Any]:
    with ollama.Client(host=url) as client:
        yield client


@pytest.fixture(scope="module")
def expected(bundled_model: tuple[Any, Any]) -> list[Tensor]:
    """Return the means of transformers' hidden states."""
    model = AutoModel.from_pretrained(demo.PATH, dtype=bundled_model[0].dtype).eval()
    with torch.no_grad():
        ids = [torch.tensor([bundled_model[1].encode(text)]) for text in TEXTS]
        return [model(input_ids=one).last_hidden_state[0].float().mean(0) for one in ids]


def check_close(actual: Any, expected: list[Tensor], *, normalized: bool = False) -> None:
    assert len(actual) == len(expected)
    for vector, target in zip(actual, expected, strict=True):
        target = target / target.norm() if normalized else target
        error = torch.tensor(vector) - target
        assert float(error.norm() / target.norm()) < 2e-2


def post(url: str, path: str, **body: Any) -> Any:
    return httpx.post(f"{url}{path}", json=body, timeout=60)


def test_openai_client_gets_the_embeddings_of_transformers(
    client: Any, expected: list[Tensor], bundled_model: tuple[Any, Any]
) -> None:
    reply = client.embeddings.create(model="inside", input=TEXTS)  # asks for base64
    plain = client.embeddings.create(model="inside", input=TEXTS, encoding_format="float")
    vectors = [item.embedding for item in reply.data]
    check_close(vectors, expected)
    assert vectors == [item.embedding for item in plain.data]
    assert [item.index for item in reply.data] == [0, 1, 2] and reply.model == "inside"
    tokens = [bundled_model[1].encode(text) for text in TEXTS]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, tokens))
    assert client.embeddings.create(model="inside", input=tokens).data == reply.data
    one = client.embeddings.create(model="inside", input=tokens[2], user="me").data
    assert [item.embedding for item in one] == vectors[2:]


def test_ollama_client_gets_vectors_of_length_1(
    ollama_client: Any, expected: list[Tensor], bundled_model: tuple[Any, Any]
) -> None:
    reply = ollama_client.embed("inside:latest", TEXTS, keep_alive="5m", options={"num_ctx": 8})
    check_close(reply.embeddings, expected, normalized=True)
    count = sum(len(bundled_model[1].encode(text)) for text in TEXTS)
    assert reply.prompt_eval_count == count and reply.total_duration > 1e5
    assert reply.model == "inside" and reply.load_duration == 0
    (one,) = ollama_client.embed("inside", TEXTS[1]).embeddings
    assert one == pytest.approx(reply.embeddings[1], abs=1e-6)
    assert "embedding" in ollama_client.show("inside").capabilities
    assert not ollama_client.embed("inside", "").embeddings  # loads the model


def test_checkpoint_chooses_pooling_and_normalization(bundled_model: tuple[Any, Any]) -> None:
    declared = DeclaredPooling(UNIT_LAST)
    with serve_model(*bundled_model, declared_pooling=declared, **OPTIONS) as (service, url):
        data = post(url, "/v1/embeddings", input=TEXTS).json()["data"]
        last = [service.engine.embed(text, UNIT_LAST).result(60) for text in TEXTS]
        short = post(url, "/v1/embeddings", input=TEXTS[0], dimensions=6).json()["data"]
    assert [item["embedding"] for item in data] == [pytest.approx(v.tolist()) for v in last]
    assert all(float(v.norm()) == pytest.approx(1) for v in last)
    assert short[0]["embedding"] == pytest.approx((last[0][:6] / last[0][:6].norm()).tolist())


def test_dimensions_cut_the_vectors(client: Any, ollama_client: Any) -> None:
    (whole,) = client.embeddings.create(model="inside", input=TEXTS[0]).data
    (short,) = client.embeddings.create(model="inside", input=TEXTS[0], dimensions=8).data
    assert short.embedding == whole.embedding[:8]  # the checkpoint does not normalize
    (unit,) = ollama_client.embed("inside", TEXTS[0], dimensions=8).embeddings
    target = torch.tensor(whole.embedding[:8])
    assert unit == pytest.approx((target / target.norm()).tolist(), abs=1e-6)
    width = len(whole.embedding)
    with pytest.raises(openai.BadRequestError, match=f"dimensions={width + 1}: .* {width}"):
        client.embeddings.create(model="inside", input=TEXTS[0], dimensions=width + 1)


def test_ollama_truncates_long_texts_by_default(
    ollama_client: Any, client: Any, bundled_model: tuple[Any, Any]
) -> None:
    text = TEXTS[1] * 20
    tokens = bundled_model[1].encode(text)[:128]
    reply = ollama_client.embed("inside", text)
    target = torch.tensor(client.embeddings.create(model="inside", input=tokens).data[0].embedding)
    check_close(reply.embeddings, [target], normalized=True)
    assert reply.prompt_eval_count == 128
    with pytest.raises(ollama.ResponseError, match="128 tokens or more") as caught:
        ollama_client.embed("inside", text, truncate=False)
    assert caught.value.status_code == 400
    with pytest.raises(openai.BadRequestError, match="128 tokens or more") as refused:
        client.embeddings.create(model="inside", input=[TEXTS[0], text])
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("length", [3, 300, 30_000])
def test_special_tokens_around_a_cut_text_stay(length: int) -> None:
    tokenizer = copy.deepcopy(AutoTokenizer.from_pretrained(demo.PATH))
    plain = tokenizer.encode("import os\n" * length)
    special = [("<a>", 1), ("<b>", 2)]
    template = processors.TemplateProcessing(single="<a> $A <b>", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = template
    tokens = encode_truncated(tokenizer, "import os\n" * length, 100)
    assert tokens == [1, *plain[:98], 2]
    assert encode_truncated(tokenizer, plain, 7) == plain[:7]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": []}, "input: it is empty: give a text"),
        ({"input": ""}, "input: it is empty: give a text"),
        ({"input": ["a", ""]}, "input[1] is empty: leave it out"),
        ({"input": [[]]}, "input[0] is empty: leave it out"),
        ({"input": [-1]}, "input"),
        ({"input": [1 << 30]}, "has token 1073741824"),
        ({"input": ["a"] * 2049}, "2049 inputs, at most 2048 are allowed: split the request"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "instruction": "query"}, "instruction: the server has no such field"),
        ({}, "input"),
    ],
)
def test_invalid_bodies_are_refused(url: str, body: dict[str, Any], message: str) -> None:
    reply = post(url, "/v1/embeddings", **body)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_errors_have_the_shape_of_their_api(client: Any, ollama_client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has 'inside'"):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(ollama.ResponseError, match="this server has 'inside'"):
        ollama_client.embed("other", "a")
    with pytest.raises(ollama.ResponseError, match=r"input\[1\] is empty"):
        ollama_client.embed("inside", ["a", ""])


def test_a_model_without_pooling_says_so(running: tuple[Service, str]) -> None:
    for path in ("/v1/embeddings", "/api/embed"):
        reply = post(running[1], path, model="inside", input="a")
        assert reply.status_code == 400
        assert "this model declares no pooling: " in json.dumps(reply.json()["error"])
    shown = post(running[1], "/api/show", model="inside").json()
    assert "embedding" not in shown["capabilities"]


def test_many_inputs_take_few_places(bundled_model: tuple[Any, Any]) -> None:
    declared, inputs = DeclaredPooling(MEAN), [f"x = {number}" for number in range(60)]
    with serve_model(*bundled_model, declared_pooling=declared, max_waiting=4, **OPTIONS) as (
        service,
        url,
    ):
        peaks, embed = list[int](), service.engine.embed

        def count_load(*args: Any, **options: Any) -> EmbeddingFuture:
            load = service.engine.load("")
            peaks.append(load["waiting"] + load["running"])
            return embed(*args, **options)

        service.engine.embed = count_load
        data = post(url, "/v1/embeddings", input=inputs).json()["data"]
        (alone,) = post(url, "/v1/embeddings", input=inputs[41]).json()["data"]
        assert data[41]["embedding"] == pytest.approx(alone["embedding"], abs=1e-4)
        assert len(data) == 60 and 0 < max(peaks) <= MAX_OPEN_INPUTS
        counts = service.tenant_stats("")
        assert (counts["requests"], counts["finished"]) == (61, 61)
        assert service.stats()["requests"] == 61


def test_a_client_that_leaves_cancels_its_inputs(bundled_model: tuple[Any, Any]) -> None:
    declared = DeclaredPooling(MEAN)
    with serve_model(*bundled_model, declared_pooling=declared, **OPTIONS) as (service, url):
        perform = service.engine._worker._perform

        def perform_slowly(action: Any) -> None:
            time.sleep(0.05)
            perform(action)

        service.engine._worker._perform = perform_slowly
        post_and_leave(service, f"{url}/v1/embeddings", {"input": ["a"] * 500})
        until = time.monotonic() + 30
        while service._num_choices[""]:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert service.engine.stats()["requests"] < 500  # the next test counts the cancel
        assert post(url, "/v1/embeddings", input="a").status_code == 200


def test_a_client_that_leaves_cancels_the_input_it_waits_for(
    bundled_model: tuple[Any, Any],
) -> None:
    """Regression: the engine computed all of it, and its place was free meanwhile."""
    options = {"declared_pooling": DeclaredPooling(MEAN), **OPTIONS}
    with serve_model(*bundled_model, **options) as (service, url):
        worker, can_end = service.engine._worker, threading.Event()
        perform, places = worker._perform, list[int]()

        def perform_slowly(action: Any) -> None:
            can_end.wait(30)
            places.append(service._num_choices[""])
            perform(action)

        worker.scheduler.chunk_sizer.max_chunk, worker._perform = 8, perform_slowly
        post_and_leave(service, f"{url}/v1/embeddings", {"input": "a b " * 60})
        can_end.set()
        while (load := service.engine.load(""))["running"] or load["waiting"]:
            time.sleep(0.01)
        stats = service.engine.stats()
        assert (stats["requests"], stats["cancelled"], stats["finished"]) == (1, 1, 0)
        assert places[0] == 1
        assert post(url, "/v1/embeddings", input="a").status_code == 200
        assert service._num_choices[""] == 0


def test_a_failed_forward_is_an_error_of_the_server(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, declared_pooling=DeclaredPooling(MEAN), **OPTIONS) as (
        service,
        url,
    ):
        compute = service.engine._worker.batch.decoder.compute_hidden_states

        def fail(ids: list[int], cache: Any) -> Tensor:
            compute(ids, cache)
            raise ValueError("inside the model")

        service.engine._worker.batch.decoder.compute_hidden_states = fail
        reply = post(url, "/v1/embeddings", input=["a", "b"])
        assert reply.status_code == 500
        assert reply.json()["error"]["message"] == "the request failed"


def test_keys_apply_and_a_full_server_says_so(bundled_model: tuple[Any, Any]) -> None:
    keys = ApiKeys(["first-key", "second-key"])
    options: dict[str, Any] = OPTIONS | {"max_sequences": 1, "max_waiting": 1}
    declared = DeclaredPooling(MEAN)
    with serve_model(*bundled_model, keys, declared_pooling=declared, **options) as (service, url):
        assert post(url, "/v1/embeddings", input="a").status_code == 401
        headers = {"Authorization": "Bearer first-key"}
        body = {"input": ["a"] * 5}
        reply = httpx.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=60)
        assert len(reply.json()["data"]) == 5  # though a tenant has one place
        gate, perform = threading.Event(), service.engine._worker._perform

        def wait(action: Any) -> None:
            gate.wait(30)
            perform(action)

        service.engine._worker._perform = wait
        held = threading.Thread(
            target=lambda: httpx.post(
                f"{url}/v1/embeddings", json=body, headers=headers, timeout=60
            )
        )
        held.start()
        tenant = service.keys.find_tenant("first-key")
        deadline = time.monotonic() + 20
        while not service._num_choices[tenant] and time.monotonic() < deadline:
            time.sleep(0.01)
        busy = httpx.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=60)
        gate.set()
        held.join(30)
        assert busy.status_code == 429 and "Retry-After" in busy.headers
        assert service._num_choices[tenant] == 0


def test_a_folder_is_served_with_its_pooling(
    bundled_model: tuple[Any, Any], tmp_path: Path
) -> None:
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{name}"}
        for path, name in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"))
    ]
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    config = json.dumps({"pooling_mode_lasttoken": True})
    (tmp_path / "1_Pooling" / "config.json").write_text(config)
    settings = ServerSettings(model=str(tmp_path), pack=False)
    with open_service(settings, *bundled_model, "affine8", Prefixes(None), ApiKeys()) as service:
        embeddings = asyncio.run(service.embed(["import os\n"], ""))
    assert embeddings.pooling == UNIT_LAST
    assert float(embeddings.vectors[0].norm()) == pytest.approx(1)
