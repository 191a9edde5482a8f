"""Replicas on Ray Serve: the same engine and the same application, many times, behind one front.

    serve run kvant.serve.ray:app model=PATH_OR_ID store=redis://HOST replicas=4

The front reads a request, names its first pages and passes it on. A router on Ray's interface says
to which replica; that one answers as `kvant serve` does, and the front passes on what it says. A
request of which nothing was said yet when its replica went is asked of another one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kvant.errors import CacheError

try:
    import ray
    from ray import serve
except ImportError as error:
    raise CacheError(f"{error}: pip install 'kvant[ray]'") from None

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from ray.exceptions import RayActorError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.schema import LoggingConfig

from kvant.devices import parse_device
from kvant.prefixes import Prefixes
from kvant.probing import attach_checked
from kvant.serve.routed_request import RoutedRequest
from kvant.serve.router import PageRouter
from kvant.server import ApiKeys, ServerSettings, create_app, load_keys
from kvant.server.access import UNKNOWN_KEY_MESSAGE
from kvant.server.app import BODY_TOO_LARGE_MESSAGE, MAX_BODY_BYTES
from kvant.server.http_server import is_local
from kvant.server.response_writers import format_event, make_error

log = logging.getLogger("kvant")

LOCAL_HOST = "127.0.0.1"
MAX_REPLICA_TRIES = 3  # replicas of one request, where each goes before it says anything
MAX_REPORTED_KEYS = 4096  # keys that a replica tells a router
STATS_PERIOD_S = 10.0  # seconds in which it does
SCALE_UP_SHARE = 0.9  # of the bytes of all replicas: from there on there should be more of them
APP_NAME = "kvant"
REPLICA_HEADER = b"x-kvant-replica"  # the header in which an answer says who answered
USED_METRIC = "used"
STORE_FLUSH_S = 30.0  # seconds for what a store is yet to have, as a replica ends
MAX_ONGOING_REQUESTS = 1_000_000  # requests under way: a replica says itself that its house is full


class DeploymentSettings(ServerSettings):
    """What a deployment is of; the arguments of `app`."""

    api_keys: Path | None = None  # or KVANT_API_KEYS, where it is deployed
    host: str = LOCAL_HOST  # by which clients may call it that need no keys
    replicas: int = Field(default=1, ge=1)
    most_replicas: int | None = Field(default=None, ge=1)  # to which it may grow
    fronts: int = Field(default=1, ge=1)
    cpus: float = Field(default=1, ge=0)  # of a replica, and with as many threads it computes
    gpus: float = Field(default=0, ge=0)
    grace: float = Field(default=30, ge=0)  # seconds for what is under way as it ends

    def assign_resources(self) -> DeploymentSettings:
        """The same, with replicas that share the cores of the cluster, or have a GPU each."""
        there = ray.cluster_resources()
        if parse_device(self.device).type == "cuda":
            if self.device not in (None, "cuda"):
                raise ValueError(
                    f"--device {self.device} beside --replicas: each has one of its own"
                )
            if (gpus := int(there.get("GPU", 0))) < self.replicas:
                raise ValueError(
                    f"--replicas {self.replicas}: there are {gpus} GPUs, one is for each"
                )
            return self.model_copy(update={"cpus": 0, "gpus": 1})
        return self.model_copy(update={"cpus": there.get("CPU", 1) / self.replicas})


# ---- a replica


class EngineReplica:
    """An engine, and the application of it."""

    def __init__(self, settings: DeploymentSettings, api_keys: ApiKeys) -> None:
        self._resources = ExitStack()
        if not settings.gpus:
            torch.set_num_threads(max(1, int(settings.cpus)))
        model, tokenizer = settings.load()
        found = attach_checked(model, settings.kv_cache, tokenizer, guard=settings.guard)
        if found.warning is not None:
            log.warning("%s", found.warning)
        kept = Prefixes(settings.max_prefix_bytes, store=settings.store or None)
        self._resources.enter_context(kept)  # in the end it is written to the store
        served = settings.open_service(model, tokenizer, found.spec, kept, api_keys)
        self._service = self._resources.enter_context(served)
        self._resources.callback(self._service.close)
        self._app = create_app(self._service, settings.host)
        self._recent_keys = OrderedDict[bytes, None]()
        self._replica_header = (
            REPLICA_HEADER,
            serve.get_replica_context().replica_id.unique_id.encode(),
        )

    async def stream_answer(self, request: RoutedRequest) -> AsyncIterator[Any]:
        """The status and headers of an answer, then its bytes as they come."""
        said: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        body = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.create_task(self._app(request.scope, receive, said.put))
        answering.add_done_callback(lambda task: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], self._replica_header]
                elif told := message.get("body", b""):
                    yield told
        finally:
            gone.set()
            with suppress(Exception):
                await answering
        self._remember_keys(request.page_keys)

    def _remember_keys(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._recent_keys[key] = None
            self._recent_keys.move_to_end(key)
        while len(self._recent_keys) > MAX_REPORTED_KEYS:
            self._recent_keys.popitem(last=False)

    def record_routing_stats(self) -> dict[str, Any]:
        """For routers that begin later than it did."""
        return {"keys": tuple(self._recent_keys)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of its bytes that requests use; what is kept besides can go."""
        told = self._service.stats()
        kept, most = told["prefixes"], told["max_bytes"]
        return {USED_METRIC: (told["nbytes_held"] - kept["nbytes_idle"]) / most if most else 0.0}

    def check_health(self) -> None:
        if not self._service.is_ready:
            raise RuntimeError("the engine does not serve any more")

    def __del__(self) -> None:
        self._resources.close()


def choose_num_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """So many replicas that neither places nor bytes are short."""
    used = (context.aggregated_metrics or {}).get(USED_METRIC, {})
    by_bytes = sum(used.values()) / SCALE_UP_SHARE
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    return max(by_bytes, by_requests), {}


# ---- the front


class HttpFront:
    """Where clients ask."""

    def __init__(self, replicas: Any, api_keys: ApiKeys) -> None:
        self._stream_answer = replicas.options(stream=True).stream_answer
        self._api_keys = api_keys

    async def __call__(self, http: Request) -> Response:
        if not (len(self._api_keys) or (http.client and is_local(http.client.host))):
            return make_refusal(
                403, "only this machine may ask: a server for others needs api_keys"
            )
        tenant = self._api_keys.authenticate(http.headers.get("authorization", ""))
        if tenant is None and http.method == "POST":  # what else there is a replica answers
            return make_refusal(401, UNKNOWN_KEY_MESSAGE, code="invalid_api_key")
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return make_refusal(413, BODY_TOO_LARGE_MESSAGE)
        asked = RoutedRequest.from_scope(http.scope, bytes(body), tenant or "")
        for _ in range(MAX_REPLICA_TRIES):
            stream = self._stream_answer.remote(asked)
            try:
                status, headers = await anext(stream)
                first = await anext(stream, b"")
            except RayActorError as error:
                log.warning("a replica went before it answered: %s", error)
                continue
            found = StreamingResponse(
                forward_answer(stream, first, has_event_stream(headers)), status
            )
            found.raw_headers = headers
            return found
        return make_refusal(
            503, f"{MAX_REPLICA_TRIES} replicas went before they answered", "server_error"
        )


async def forward_answer(stream: Any, first: bytes, is_event_stream: bool) -> AsyncIterator[bytes]:
    """What a replica says, to its end or to the end of that replica."""
    try:
        yield first
        async for part in stream:
            yield part
    except RayActorError as error:
        log.warning("a replica went before its answer was whole: %s", error)
        if not is_event_stream:
            raise
        lost = make_error("the replica that answered is gone: ask again", "server_error")
        yield format_event(lost).encode()
    finally:
        stream.cancel()


def make_refusal(
    status: int, message: str, kind: str = "invalid_request_error", code: str | None = None
) -> Response:
    return JSONResponse(make_error(message, kind, None, code), status)


def has_event_stream(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


# ---- all of it


def app(options: Mapping[str, Any] | DeploymentSettings) -> serve.Application:
    """For `serve run`, and for the `import_path` of a YAML file, with its arguments."""
    settings = DeploymentSettings.model_validate(options)
    settings.check()
    clients = load_keys(settings.api_keys)
    if settings.most_replicas is None:
        count: dict[str, Any] = {"num_replicas": settings.replicas}
    else:
        growing = AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.most_replicas,
            target_ongoing_requests=settings.max_sequences,
            policy=AutoscalingPolicy(policy_function=choose_num_replicas),
        )
        count = {"autoscaling_config": growing}
    replicas = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PageRouter,
            request_routing_stats_period_s=STATS_PERIOD_S,
        ),
        **count,
        **_make_shutdown_options(settings.grace + STORE_FLUSH_S),
    )(EngineReplica)
    front = serve.deployment(
        name="front",
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0},
        **_make_shutdown_options(settings.grace),
    )(HttpFront)
    return front.bind(replicas.bind(settings, clients), clients)


def _make_shutdown_options(seconds: float) -> dict[str, Any]:
    """What is under way has so many seconds as a deployment ends."""
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": seconds,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


@contextmanager
def deploy(settings: DeploymentSettings, port: int) -> Iterator[None]:
    """For as long as it is asked; on the cluster to which Ray is connected."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": settings.host, "port": port}, logging_config=quiet)
    try:
        serve.run(app(settings), name=APP_NAME, route_prefix="/", logging_config=quiet)
        yield
    finally:
        serve.delete(APP_NAME, _blocking=False)
        until = time.monotonic() + settings.grace + 2 * STORE_FLUSH_S
        while APP_NAME in serve.status().applications and time.monotonic() < until:
            time.sleep(0.1)


@contextmanager
def connect() -> Iterator[None]:
    """To the cluster of RAY_ADDRESS, if that is set, else to one of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    there = None if "RAY_ADDRESS" in os.environ else "local"
    ray.init(there, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def run(settings: DeploymentSettings, port: int, on_started: Callable[[int], None]) -> None:
    """Serve until a signal ends it; the second time at once."""
    ended = threading.Event()

    def end(number: int, frame: object) -> None:
        if not up:
            raise SystemExit(0)
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    up = False
    port = find_free_port(settings.host, port)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        with connect():
            for one in before:  # Ray has put a handler there that ends the process
                signal.signal(one, end)
            with deploy(settings.assign_resources(), port):
                up = True
                on_started(port)
                ended.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def find_free_port(host: str, port: int) -> int:
    """A port on which nobody listens yet: Ray would not say so."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port))
        return int(one.getsockname()[1])
