"""Run replicas of the server on Ray Serve, with prefix-aware routing.

    serve run kvant.serve.ray:app model=PATH_OR_ID store=redis://HOST replicas=4

    client ---> HttpFront ---> PageRouter ---> EngineReplica (engine and application)
                authenticate,  choose a        respond as
                hash pages     replica         `kvant serve`

The front forwards the response of the replica. If a replica dies before it responds, the front
retries the request on another one.
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
from fastapi.responses import StreamingResponse
from pydantic import Field
from ray.exceptions import RayActorError
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingContext,
    AutoscalingPolicy,
    RequestRouterConfig,
)
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig

from kvant.platform.devices import parse_device
from kvant.prefixes import Prefixes
from kvant.probing import attach_checked
from kvant.serve.routing import PrefixRouter, RoutedRequest
from kvant.server import ApiKeys, ServerSettings, create_app, load_keys, open_service, open_tracer
from kvant.server.errors import make_error, respond
from kvant.server.http_server import is_local
from kvant.server.middleware import MAX_IMAGE_BODY_BYTES
from kvant.server.response_writers import format_stream_error
from kvant.server.settings import UNKNOWN_KEY_MESSAGE, read_authorization

log = logging.getLogger("kvant")

LOCAL_HOST = "127.0.0.1"
MAX_REPLICA_TRIES = 3  # per request
MAX_REPORTED_KEYS = 16384  # prefix keys that a replica reports to routers
STATS_PERIOD_S = 10.0  # between two such reports
SCALE_UP_SHARE = 0.9  # of the bytes of all replicas: more use starts another replica
APP_NAME = "kvant"
REPLICA_HEADER = b"x-kvant-replica"  # names the replica in its responses
USED_METRIC = "used"
STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
STORE_FLUSH_S = 30.0  # for pending store writes when a replica stops
MAX_ONGOING_REQUESTS = 1_000_000  # no limit here: a replica limits its requests itself, with 429


class DeploymentSettings(ServerSettings):
    """Configuration of a deployment: the arguments of `app`."""

    api_keys: Path | None = None  # in addition to KVANT_API_KEYS of the deploying process
    host: str = LOCAL_HOST  # without keys, requests must name this host
    replicas: int = Field(default=1, ge=1)
    most_replicas: int | None = Field(default=None, ge=1)  # upper limit of autoscaling
    fronts: int = Field(default=1, ge=1)
    cpus: float = Field(default=1, ge=0)  # per replica; also its number of threads
    gpus: float = Field(default=0, ge=0)
    grace: float = Field(default=30, ge=0)  # seconds for running requests at shutdown

    def assign_resources(self) -> DeploymentSettings:
        """Return a copy that splits the cluster's cores among replicas, or gives each a GPU."""
        resources = ray.cluster_resources()
        if parse_device(self.device).type == "cuda":
            if self.device not in (None, "cuda"):
                raise ValueError(
                    f"--device {self.device} with --replicas: each replica has its own GPU; give "
                    "--device cuda"
                )
            if (num_gpus := int(resources.get("GPU", 0))) < self.replicas:
                raise ValueError(
                    f"--replicas {self.replicas}: each needs a GPU, the cluster has {num_gpus}"
                )
            return self.model_copy(update={"cpus": 0, "gpus": 1})
        return self.model_copy(update={"cpus": resources.get("CPU", 1) / self.replicas})


# ---- a replica


class EngineReplica:
    """One replica: an engine and its application."""

    def __init__(self, settings: DeploymentSettings, api_keys: ApiKeys) -> None:
        self._resources = ExitStack()
        if not settings.gpus:
            torch.set_num_threads(max(1, int(settings.cpus)))
        model, tokenizer = settings.load()
        verdict = attach_checked(model, settings.kv_cache, tokenizer, guard=settings.guard)
        if verdict.warning is not None:
            log.warning("%s", verdict.warning)
        tracer = self._resources.enter_context(open_tracer())
        prefixes = None
        if settings.shares_prefixes:
            prefixes = Prefixes(settings.max_prefix_bytes, store=settings.store or None)
            self._resources.enter_context(prefixes)  # its exit writes pending pages to the store
        service = open_service(settings, model, tokenizer, verdict.spec, prefixes, api_keys)
        self._service = self._resources.enter_context(service)
        self._resources.callback(self._service.close)
        self._app = create_app(self._service, settings.host, tracer)
        self._recent_keys = OrderedDict[bytes, None]()
        self._replica_header = (
            REPLICA_HEADER,
            serve.get_replica_context().replica_id.unique_id.encode(),
        )

    async def stream_answer(self, request: RoutedRequest) -> AsyncIterator[Any]:
        """Yield the status and headers of the response, then chunks of its body."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        disconnected = asyncio.Event()
        pending_body = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending_body:
                return pending_body.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        response = asyncio.create_task(self._app(request.scope, receive, messages.put))
        response.add_done_callback(lambda task: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], self._replica_header]
                elif chunk := message.get("body", b""):
                    yield chunk
        finally:
            disconnected.set()
            with suppress(Exception):
                await response
        self._remember_keys(request.page_keys)

    def _remember_keys(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._recent_keys[key] = None
            self._recent_keys.move_to_end(key)
        while len(self._recent_keys) > MAX_REPORTED_KEYS:
            self._recent_keys.popitem(last=False)

    def record_routing_stats(self) -> dict[str, Any]:
        """Report recent keys, for routers that started after this replica."""
        return {"keys": tuple(self._recent_keys)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the share of `max_bytes` in use, without idle prefixes, which can be evicted."""
        stats = self._service.stats()
        max_bytes = stats["max_bytes"]
        if not max_bytes:
            return {USED_METRIC: 0.0}
        num_idle = stats["prefixes"]["nbytes_idle"] if stats["prefixes"] else 0
        used = stats["nbytes_held"] + stats["nbytes_drafts"] - num_idle
        return {USED_METRIC: used / max_bytes}

    def check_health(self) -> None:
        if not self._service.is_ready:
            raise RuntimeError("the engine has stopped")

    def __del__(self) -> None:
        self._resources.close()


def choose_num_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the replicas needed for the bytes in use and for the ongoing requests."""
    used = (context.aggregated_metrics or {}).get(USED_METRIC, {})
    by_bytes = sum(used.values()) / SCALE_UP_SHARE
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    return max(by_bytes, by_requests), {}


# ---- the router


class PageRouter(RequestRouter):  # type: ignore[misc]
    """Send each request to the replica that probably has its pages in cache.

    Adapts PrefixRouter to Ray Serve, which pickles this class to every process that sends requests.
    """

    def initialize_state(self) -> None:
        self._router = PrefixRouter[str]()
        self._reported_replicas = set[str]()  # whose keys from before this router are known

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in set(self._router.servers) - set(by_name):
            self._router.remove_server(name)
        self._reported_replicas &= set(by_name)
        for name, replica in by_name.items():
            self._router.add_server(name)
            if name not in self._reported_replicas and (stats := replica.routing_stats):
                self._reported_replicas.add(name)
                self._router.add_keys(name, stats["keys"])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.remove_server(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            request = next(iter(pending_request.args), None)
        if not isinstance(request, RoutedRequest):
            return [candidate_replicas]
        ranked = [
            name
            for name in self._router.rank_servers(request.page_keys, request.num_pages)
            if name in by_name
        ]
        if ranked:  # now, not in on_send_request: requests with the same prefix may follow at once
            self._router.assign_request(ranked[0], request.page_keys)
        return [[by_name[name]] for name in ranked]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        if replica_id.unique_id in self._router.servers:
            self._router.start_request(replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._router.finish_request(replica_id.unique_id)


# ---- the front


class HttpFront:
    """The HTTP endpoint: authenticates requests and forwards them to replicas."""

    def __init__(
        self, replicas: Any, api_keys: ApiKeys, adapters: frozenset[str] = frozenset()
    ) -> None:
        self._stream_answer = replicas.options(stream=True).stream_answer
        self._api_keys = api_keys
        self._adapters = adapters  # names; each stands for one adapter in all replicas

    async def __call__(self, http: Request) -> Response:
        if not (len(self._api_keys) or (http.client and is_local(http.client.host))):
            message = "without api_keys, only clients on this machine are accepted: set api_keys"
            return make_refusal(http, 403, message)
        tenant = self._api_keys.authenticate(read_authorization(http.headers))
        if tenant is None and http.method == "POST":  # replicas authenticate other methods
            return make_refusal(http, 401, UNKNOWN_KEY_MESSAGE, code="invalid_api_key")
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > MAX_IMAGE_BODY_BYTES:
                return make_refusal(http, 413, f"the body exceeds {MAX_IMAGE_BODY_BYTES} bytes")
        request = RoutedRequest.from_scope(http.scope, bytes(body), tenant or "", self._adapters)
        for _ in range(MAX_REPLICA_TRIES):
            stream = self._stream_answer.remote(request)
            try:
                status, headers = await anext(stream)
                first_chunk = await anext(stream, b"")
            except RayActorError as error:
                log.warning("a replica died before it responded: %s", error)
                continue
            is_stream = dict(headers).get(b"content-type", b"").startswith(STREAM_TYPES)
            path = http.url.path if is_stream else None
            response = StreamingResponse(forward_answer(stream, first_chunk, path), status)
            response.raw_headers = headers
            return response
        message = f"{MAX_REPLICA_TRIES} replicas died before they responded: retry later"
        return make_refusal(http, 503, message, "server_error")


async def forward_answer(
    stream: Any, first_chunk: bytes, stream_path: str | None
) -> AsyncIterator[bytes]:
    """Yield the body of a replica's response.

    If the replica dies, a stream of events or lines, whose path is given, ends with an error.
    """
    try:
        yield first_chunk
        async for chunk in stream:
            yield chunk
    except RayActorError as error:
        log.warning("a replica died before its response was complete: %s", error)
        if stream_path is None:
            raise
        body = make_error("the replica of this request died: send it again", "server_error")
        yield format_stream_error(stream_path, body).encode()
    finally:
        stream.cancel()


def make_refusal(
    http: Request,
    status: int,
    message: str,
    error_type: str = "invalid_request_error",
    code: str | None = None,
) -> Response:
    return respond(http, status, make_error(message, error_type, None, code))


# ---- the deployment


def app(options: Mapping[str, Any] | DeploymentSettings) -> serve.Application:
    """Build the application for `serve run` or a YAML file's `import_path`."""
    settings = DeploymentSettings.model_validate(options)
    settings.check()
    api_keys = load_keys(settings.api_keys)
    if settings.most_replicas is None:
        scaling: dict[str, Any] = {"num_replicas": settings.replicas}
    else:
        autoscaling = AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.most_replicas,
            target_ongoing_requests=settings.max_sequences,
            policy=AutoscalingPolicy(policy_function=choose_num_replicas),
        )
        scaling = {"autoscaling_config": autoscaling}
    replicas = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PageRouter,
            request_routing_stats_period_s=STATS_PERIOD_S,
        ),
        **scaling,
        **_make_shutdown_options(settings.grace + STORE_FLUSH_S),
    )(EngineReplica)
    front = serve.deployment(
        name="front",
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0},
        **_make_shutdown_options(settings.grace),
    )(HttpFront)
    adapters = frozenset(settings.adapters)
    return front.bind(replicas.bind(settings, api_keys), api_keys, adapters)


def _make_shutdown_options(seconds: float) -> dict[str, Any]:
    """Return options that give running requests `seconds` at shutdown."""
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": seconds,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


@contextmanager
def deploy(settings: DeploymentSettings, port: int) -> Iterator[None]:
    """Run the deployment on the connected Ray cluster until the context exits."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": settings.host, "port": port}, logging_config=quiet)
    try:
        serve.run(app(settings), name=APP_NAME, route_prefix="/", logging_config=quiet)
        yield
    finally:
        serve.delete(APP_NAME, _blocking=False)
        deadline = time.monotonic() + settings.grace + 2 * STORE_FLUSH_S
        while APP_NAME in serve.status().applications and time.monotonic() < deadline:
            time.sleep(0.1)


@contextmanager
def connect() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS if set, else start a local one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = None if "RAY_ADDRESS" in os.environ else "local"
    ray.init(address, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def run(settings: DeploymentSettings, port: int, on_started: Callable[[int], None]) -> None:
    """Serve until a signal; the first one drains requests, the second stops at once."""
    should_stop = threading.Event()

    def handle_signal(number: int, frame: object) -> None:
        if not is_running:
            raise SystemExit(0)
        if should_stop.is_set():
            raise KeyboardInterrupt
        should_stop.set()

    is_running = False
    port = find_free_port(settings.host, port)
    previous_handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with connect():
            for number in previous_handlers:  # replaces Ray's handler, which ends the process
                signal.signal(number, handle_signal)
            with deploy(settings.assign_resources(), port):
                is_running = True
                on_started(port)
                should_stop.wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def find_free_port(host: str, port: int) -> int:
    """Return `port`, or any free port for 0; raise OSError if it is in use, which Ray does not."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
