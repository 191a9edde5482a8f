"""Test the figures that tenants see: their own, and for an admin those of all."""

from __future__ import annotations

import json
import pickle
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from kvant.server import ApiKeys
from server.conftest import serve_model
from server.test_server import PROMPT, wait_until_idle

NAMES = ("first-key", "second-key", "admin-key")
COUNTS = ("requests", "finished", "cancelled", "failed", "prompt_tokens", "cached_tokens")
COUNTS = (*COUNTS, "restored_tokens", "completion_tokens")


def get(url: str, path: str, key: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", headers={"Authorization": f"Bearer {key}"})


def ask(url: str, key: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": PROMPT * 9, "max_tokens": 3, "ignore_eos": True} | more
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def read_counts(stats: dict[str, Any]) -> dict[str, int]:
    return {name: stats[name] for name in COUNTS}


def sum_tenants(url: str, service: Any) -> dict[str, int]:
    """Return the figures of all tenants once the engine is idle and every end is counted."""
    wait_until_idle(service)
    until = time.monotonic() + 30
    while any(service._num_choices.values()):
        assert time.monotonic() < until
        time.sleep(0.01)
    tenants = [service.tenant_stats(service.keys.find_tenant(key)) for key in NAMES]
    assert not any(tenant["running"] or tenant["waiting"] for tenant in tenants)
    totals = Counter[str]()
    for tenant in tenants:
        totals.update(read_counts(tenant))
    return {name: totals[name] for name in COUNTS}


def test_tenant_sees_only_its_own_figures(bundled_model: tuple[Any, Any]) -> None:
    keys = ApiKeys(NAMES[:2], admins=NAMES[2:])
    with serve_model(*bundled_model, keys=keys) as (service, url):
        usage = ask(url, "first-key", n=2, temperature=1).json()["usage"]
        usage_ = ask(url, "first-key").json()["usage"]
        wait_until_idle(service)
        first = get(url, "/v1/stats", "first-key").json()
        second = get(url, "/v1/stats", "second-key").json()
        whole = get(url, "/v1/stats", "admin-key").json()
    cached = usage_["prompt_tokens_details"]["cached_tokens"]
    assert first["requests"] == first["finished"] == 2 and first["cached_tokens"] == cached > 0
    assert first["prompt_tokens"] == usage["prompt_tokens"] + usage_["prompt_tokens"]
    assert first["completion_tokens"] == 9
    assert first["model"] == second["model"] == "inside"
    assert not any(read_counts(second).values())
    assert read_counts(whole) == read_counts(first) and whole["nbytes_held"] > 0
    assert not {"nbytes_held", "prefixes", "first_token_seconds"} & first.keys()


def test_tenant_sees_its_running_requests(bundled_model: tuple[Any, Any]) -> None:
    keys = ApiKeys(NAMES[:2], admins=NAMES[2:])
    headers = {"Authorization": "Bearer first-key"}
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        serve_model(*bundled_model, keys=keys) as (_, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as reply,
    ):
        next(reply.iter_text())
        first, second, whole = (get(url, "/v1/stats", key).json() for key in NAMES)
        assert (first["running"], first["requests"]) == (whole["running"], 1)
        assert first["completion_tokens"] > 0 == first["finished"]
        assert not any(second[name] for name in ("running", "waiting", "sequences", *COUNTS))


def test_figures_of_tenants_add_up_to_the_totals(
    bundled_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the outcome of a request: an end, a disconnect, a refusal, a failure."""
    keys = ApiKeys(NAMES[:2], admins=NAMES[2:])
    with serve_model(*bundled_model, keys=keys, max_sequences=2, max_waiting=64) as (service, url):

        def disconnect(number: int) -> None:
            headers = {"Authorization": f"Bearer {NAMES[number % 3]}"}
            body = {"prompt": PROMPT * (number + 1), "max_tokens": 300, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as reply:
                if number % 2:
                    next(reply.iter_text())

        def send_request(number: int) -> None:
            if number % 3 == 1:
                disconnect(number)
            else:
                more = {"n": 1 + number % 2, "temperature": 1, "seed": number}
                ask(url, NAMES[number % 3], **more, max_tokens=number % 7 + 1)

        with ThreadPoolExecutor(6) as clients:
            list(clients.map(send_request, range(18)))
        assert ask(url, "first-key", prompt="").status_code == 400
        assert sum_tenants(url, service) == read_counts(service.stats())
        assert service.stats()["cancelled"] and service.stats()["cached_tokens"]

        def fails(sequences: Any, logits: Any, drafts: Any) -> list[list[Exception]]:
            return [[ValueError("why")]] * len(sequences)

        monkeypatch.setattr("kvant.engine.worker.sample_tokens", fails)
        assert ask(url, "second-key").status_code == 500
        totals = sum_tenants(url, service)
        assert totals == read_counts(service.stats()) and totals["failed"] == 1
        assert len(service._tenants) == len(NAMES)


def test_totals_need_an_admin_key(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, keys=ApiKeys(["first-key"], admins=["admin-key"])) as (_, url):
        refused = get(url, "/metrics", "first-key")
        assert get(url, "/metrics", "admin-key").status_code == 200
        assert ask(url, "admin-key").status_code == 200  # this admin is a tenant as well
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert "a line 'admin KEY' to --api-keys" in error["message"]
    assert error["code"] == "insufficient_permissions"


def test_keys_without_an_admin_hide_totals(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, keys=ApiKeys(["first-key"])) as (_, url):
        assert get(url, "/metrics", "first-key").status_code == 403
        assert "nbytes_held" not in get(url, "/v1/stats", "first-key").json()


def test_replicas_accept_admin_keys() -> None:
    """Ray sends keys to its replicas, and each of them checks them."""
    keys = ApiKeys(NAMES[:2], "secret", NAMES[2:])
    sent = pickle.loads(pickle.dumps(keys))
    flags = [sent.is_admin(keys.find_tenant(key)) for key in NAMES]
    assert flags == [False, False, True]
    assert json.dumps(sorted(vars(sent)["_admins"])).count("admin-key") == 0
