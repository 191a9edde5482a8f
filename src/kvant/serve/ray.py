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

from kvant.devices import named_device
from kvant.prefixes import Prefixes
from kvant.probing import attached
from kvant.serve.asked import Asked
from kvant.serve.router import PageRouter
from kvant.server import Keys, Settings, create_app, known
from kvant.server.access import UNKNOWN
from kvant.server.app import LARGEST, TOO_LARGE
from kvant.server.replies import event, refused
from kvant.server.running import is_local

log = logging.getLogger("kvant")

LOCAL = "127.0.0.1"
TRIED = 3  # replicas of one request, where each goes before it says anything
NEWEST = 4096  # keys that a replica tells a router
TOLD_EACH = 10.0  # seconds in which it does
FULL = 0.9  # of the bytes of all replicas: from there on there should be more of them
APP = "kvant"
NAMED = b"x-kvant-replica"  # the header in which an answer says who answered
USED = "used"
WRITING = 30.0  # seconds for what a store is yet to have, as a replica ends
UNBOUNDED = 1_000_000  # requests under way: a replica says itself that its house is full


class Deployed(Settings):
    """What a deployment is of; the arguments of `app`."""

    api_keys: Path | None = None  # or KVANT_API_KEYS, where it is deployed
    host: str = LOCAL  # by which clients may call it that need no keys
    replicas: int = Field(default=1, ge=1)
    most_replicas: int | None = Field(default=None, ge=1)  # to which it may grow
    fronts: int = Field(default=1, ge=1)
    cpus: float = Field(default=1, ge=0)  # of a replica, and with as many threads it computes
    gpus: float = Field(default=0, ge=0)
    grace: float = Field(default=30, ge=0)  # seconds for what is under way as it ends

    def shared(self) -> Deployed:
        """The same, with replicas that share the cores of the cluster, or have a GPU each."""
        there = ray.cluster_resources()
        if named_device(self.device).type == "cuda":
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


class Replica:
    """An engine, and the application of it."""

    def __init__(self, settings: Deployed, clients: Keys) -> None:
        self._open = ExitStack()
        if not settings.gpus:
            torch.set_num_threads(max(1, int(settings.cpus)))
        model, tokenizer = settings.load()
        found = attached(model, settings.kv_cache, tokenizer, guard=settings.guard)
        if found.warning is not None:
            log.warning("%s", found.warning)
        kept = Prefixes(settings.most_kept, store=settings.store or None)
        self._open.enter_context(kept)  # in the end it is written to the store
        served = settings.served(model, tokenizer, found.spec, kept, clients)
        self._service = self._open.enter_context(served)
        self._open.callback(self._service.close)
        self._app = create_app(self._service, settings.host)
        self._newest = OrderedDict[bytes, None]()
        self._named = (NAMED, serve.get_replica_context().replica_id.unique_id.encode())

    async def ask(self, asked: Asked) -> AsyncIterator[Any]:
        """The status and headers of an answer, then its bytes as they come."""
        said: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        body = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.create_task(self._app(asked.scope, receive, said.put))
        answering.add_done_callback(lambda task: said.put_nowait(None))
        try:
            while (message := await said.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], [*message["headers"], self._named]
                elif told := message.get("body", b""):
                    yield told
        finally:
            gone.set()
            with suppress(Exception):
                await answering
        self._remember(asked.keys)

    def _remember(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._newest[key] = None
            self._newest.move_to_end(key)
        while len(self._newest) > NEWEST:
            self._newest.popitem(last=False)

    def record_routing_stats(self) -> dict[str, Any]:
        """For routers that begin later than it did."""
        return {"keys": tuple(self._newest)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The share of its bytes that requests use; what is kept besides can go."""
        told = self._service.stats()
        kept, most = told["prefixes"], told["max_bytes"]
        return {USED: (told["nbytes_held"] - kept["nbytes_idle"]) / most if most else 0.0}

    def check_health(self) -> None:
        if not self._service.ready:
            raise RuntimeError("the engine does not serve any more")

    def __del__(self) -> None:
        self._open.close()


def wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """So many replicas that neither places nor bytes are short."""
    used = (context.aggregated_metrics or {}).get(USED, {})
    by_bytes = sum(used.values()) / FULL
    by_requests = context.total_num_requests / context.config.target_ongoing_requests
    return max(by_bytes, by_requests), {}


# ---- the front


class Front:
    """Where clients ask."""

    def __init__(self, replicas: Any, clients: Keys) -> None:
        self._ask = replicas.options(stream=True).ask
        self._clients = clients

    async def __call__(self, http: Request) -> Response:
        if not (len(self._clients) or (http.client and is_local(http.client.host))):
            return told(403, "only this machine may ask: a server for others needs api_keys")
        tenant = self._clients.asking(http.headers.get("authorization", ""))
        if tenant is None and http.method == "POST":  # what else there is a replica answers
            return told(401, UNKNOWN, code="invalid_api_key")
        body = bytearray()
        async for part in http.stream():
            body += part
            if len(body) > LARGEST:
                return told(413, TOO_LARGE)
        asked = Asked.of(http.scope, bytes(body), tenant or "")
        for _ in range(TRIED):
            stream = self._ask.remote(asked)
            try:
                status, headers = await anext(stream)
                first = await anext(stream, b"")
            except RayActorError as error:
                log.warning("a replica went before it answered: %s", error)
                continue
            found = StreamingResponse(passed_on(stream, first, is_events(headers)), status)
            found.raw_headers = headers
            return found
        return told(503, f"{TRIED} replicas went before they answered", "server_error")


async def passed_on(stream: Any, first: bytes, events: bool) -> AsyncIterator[bytes]:
    """What a replica says, to its end or to the end of that replica."""
    try:
        yield first
        async for part in stream:
            yield part
    except RayActorError as error:
        log.warning("a replica went before its answer was whole: %s", error)
        if not events:
            raise
        lost = refused("the replica that answered is gone: ask again", "server_error")
        yield event(lost).encode()
    finally:
        stream.cancel()


def told(
    status: int, message: str, kind: str = "invalid_request_error", code: str | None = None
) -> Response:
    return JSONResponse(refused(message, kind, None, code), status)


def is_events(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


# ---- all of it


def app(asked: Mapping[str, Any] | Deployed) -> serve.Application:
    """For `serve run`, and for the `import_path` of a YAML file, with its arguments."""
    settings = Deployed.model_validate(asked)
    settings.check()
    clients = known(settings.api_keys)
    if settings.most_replicas is None:
        count: dict[str, Any] = {"num_replicas": settings.replicas}
    else:
        growing = AutoscalingConfig(
            min_replicas=settings.replicas,
            max_replicas=settings.most_replicas,
            target_ongoing_requests=settings.max_sequences,
            policy=AutoscalingPolicy(policy_function=wanted),
        )
        count = {"autoscaling_config": growing}
    replicas = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PageRouter,
            request_routing_stats_period_s=TOLD_EACH,
        ),
        **count,
        **_ends(settings.grace + WRITING),
    )(Replica)
    front = serve.deployment(
        name="front",
        num_replicas=settings.fronts,
        ray_actor_options={"num_cpus": 0},
        **_ends(settings.grace),
    )(Front)
    return front.bind(replicas.bind(settings, clients), clients)


def _ends(seconds: float) -> dict[str, Any]:
    """What is under way has so many seconds as a deployment ends."""
    return {
        "max_ongoing_requests": UNBOUNDED,
        "graceful_shutdown_timeout_s": seconds,
        "graceful_shutdown_wait_loop_s": 0.1,
    }


@contextmanager
def deployed(settings: Deployed, port: int) -> Iterator[None]:
    """For as long as it is asked; on the cluster to which Ray is connected."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": settings.host, "port": port}, logging_config=quiet)
    try:
        serve.run(app(settings), name=APP, route_prefix="/", logging_config=quiet)
        yield
    finally:
        serve.delete(APP, _blocking=False)
        until = time.monotonic() + settings.grace + 2 * WRITING
        while APP in serve.status().applications and time.monotonic() < until:
            time.sleep(0.1)


@contextmanager
def connected() -> Iterator[None]:
    """To the cluster of RAY_ADDRESS, if that is set, else to one of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    there = None if "RAY_ADDRESS" in os.environ else "local"
    ray.init(there, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def run(settings: Deployed, port: int, begun: Callable[[int], None]) -> None:
    """Serve until a signal ends it; the second time at once."""
    ended = threading.Event()

    def end(number: int, frame: object) -> None:
        if not up:
            raise SystemExit(0)
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    up = False
    port = free(settings.host, port)
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        with connected():
            for one in before:  # Ray has put a handler there that ends the process
                signal.signal(one, end)
            with deployed(settings.shared(), port):
                up = True
                begun(port)
                ended.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def free(host: str, port: int) -> int:
    """A port on which nobody listens yet: Ray would not say so."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port))
        return int(one.getsockname()[1])
