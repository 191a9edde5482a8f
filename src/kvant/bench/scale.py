"""Simulate, in integers, how routing to many replicas affects prefix reuse and latency.

The trace has the distributions of one hour of a public chat (12,031 requests, FAST'25, Mooncake's
conversations). All chats begin with the same 512 tokens. First prompts, the tokens that a turn
adds, replies and pauses are log-normal; 31% of first turns have a second one, later turns more. A
replica prefills prompts one after the other and caches what fits; a store, if there is one, holds
all prefixes. Every policy serves the same requests.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from kvant.bench import harness
from kvant.platform.sizes import format_size, parse_size
from kvant.serve.routing import KEY_DEPTHS, PrefixRouter

PAGE_TOKENS = 64
COMMON_TOKENS = 512  # at the beginning of all chats
MAX_PROMPT_TOKENS = 131_072  # a longer chat ends
MAX_REPLY_TOKENS = 4096
# Mean and standard deviation of the logarithm: of tokens, and of seconds for pauses.
FIRST_PROMPT_LOGNORMAL, TURN_LOGNORMAL = (8.51, 1.26), (6.97, 1.71)
REPLY_LOGNORMAL, PAUSE_LOGNORMAL = (5.34, 1.36), (4.88, 0.98)
# After the first turn, the second, and so on.
CONTINUE_PROBABILITIES = (0.31, 0.42, 0.51, 0.59, 0.59, 0.68, 0.77)
MEAN_TURNS = 1.63  # of a chat, with these probabilities
MICROSECONDS = 1_000_000  # per second


class ChatTrace(NamedTuple):
    """Requests in order of arrival, one column per field."""

    times: list[int]  # microseconds
    chats: list[int]
    prompts: list[int]  # tokens
    replies: list[int]


def make_trace(num_requests: int, rate: float, seed: int) -> ChatTrace:
    """Draw a trace of `num_requests` at about this rate."""
    rng = np.random.default_rng(seed)
    chats = np.arange(num_requests)
    times = rng.uniform(0, num_requests * MEAN_TURNS / rate, num_requests)
    prompts = np.clip(
        rng.lognormal(*FIRST_PROMPT_LOGNORMAL, num_requests), COMMON_TOKENS + 1, MAX_PROMPT_TOKENS
    )
    turns = list[tuple[Any, Any, Any]]()
    while len(chats):
        turns.append((times, chats, prompts))
        probability = CONTINUE_PROBABILITIES[min(len(turns), len(CONTINUE_PROBABILITIES)) - 1]
        continues = rng.random(len(chats)) < probability
        times = times[continues] + rng.lognormal(*PAUSE_LOGNORMAL, continues.sum())
        prompts = prompts[continues] + rng.lognormal(*TURN_LOGNORMAL, continues.sum())
        chats, fits = chats[continues], prompts <= MAX_PROMPT_TOKENS
        times, chats, prompts = times[fits], chats[fits], prompts[fits]
    times, chats, prompts = (np.concatenate(column) for column in zip(*turns, strict=True))
    order = np.argsort(times, kind="stable")[:num_requests]
    replies = np.clip(rng.lognormal(*REPLY_LOGNORMAL, num_requests), 1, MAX_REPLY_TOKENS)
    return ChatTrace(
        (times[order] * MICROSECONDS).astype(int).tolist(),
        chats[order].tolist(),
        prompts[order].astype(int).tolist(),
        replies.astype(int).tolist(),
    )


@dataclass(frozen=True)
class ReplicaHardware:
    """Speed and memory of a replica."""

    reads: int  # prompt tokens per second
    writes: int  # reply tokens per second, of all requests together
    bytes_a_token: int
    max_bytes: int  # of cached prefixes
    store_bytes: int  # per second from the store; 0: no store

    @property
    def restores_faster(self) -> bool:
        """Whether restoring a token is faster than computing it."""
        return self.store_bytes > self.reads * self.bytes_a_token


class SimulatedReplica:
    """A replica's cached chats, the time when it is idle again, and counts of prompt tokens."""

    def __init__(self, machine: ReplicaHardware) -> None:
        self.num_requests = self.num_kept = self.num_restored = self.num_computed = 0
        self._busy_until = 0  # microseconds
        self._machine = machine
        self._cached_chats = OrderedDict[int, int]()  # chat: tokens, least recently used first
        self._num_free_tokens = machine.max_bytes // machine.bytes_a_token

    def serve(
        self, now: int, chat: int, num_prompt: int, num_reply: int, num_stored: int
    ) -> tuple[int, int]:
        """Serve a request; return the times of the first and the last reply token."""
        machine = self._machine
        max_cached = (num_prompt - 1) // PAGE_TOKENS * PAGE_TOKENS  # one token is always computed
        common = COMMON_TOKENS if self.num_requests else 0
        num_kept = min(max_cached, max(common, self._cached_chats.get(chat, 0)))
        num_restored = 0
        if machine.restores_faster:
            num_restored = max(0, min(max_cached, num_stored) - num_kept)
            now += num_restored * machine.bytes_a_token * MICROSECONDS // machine.store_bytes
        num_computed = num_prompt - num_kept - num_restored
        self.num_requests += 1
        self.num_kept += num_kept
        self.num_restored += num_restored
        self.num_computed += num_computed
        first_token = max(now, self._busy_until) + num_computed * MICROSECONDS // machine.reads
        self._busy_until = first_token + num_reply * MICROSECONDS // machine.writes
        return first_token, self._busy_until

    def cache_chat(self, chat: int, num_tokens: int) -> None:
        """Cache a chat as the most recently used; evict the least recently used ones."""
        self._num_free_tokens -= num_tokens - self._cached_chats.pop(chat, 0)
        self._cached_chats[chat] = num_tokens
        while self._num_free_tokens < 0:
            self._num_free_tokens += self._cached_chats.popitem(last=False)[1]


class SimulatedRequest(NamedTuple):
    """What a policy knows of a request."""

    number: int
    keys: list[bytes]
    num_pages: int


def route_by_pages(request: SimulatedRequest, router: PrefixRouter[int], rng: random.Random) -> int:
    """Choose a replica by cached pages, as `kvant serve` does."""
    replica = router.rank_servers(request.keys, request.num_pages)[0]
    router.assign_request(replica, request.keys)
    return replica


def route_to_less_loaded(
    request: SimulatedRequest, router: PrefixRouter[int], rng: random.Random
) -> int:
    """Choose the less loaded of two random replicas, as Ray Serve does by default."""
    candidates = [rng.randrange(len(router.servers)) for _ in range(2)]
    return min(candidates, key=router.loads.__getitem__)


# A policy returns the replica of a request; the router counts the ongoing ones of each replica.
POLICIES: dict[str, Callable[[SimulatedRequest, PrefixRouter[int], random.Random], int]] = {
    "pages": route_by_pages,
    "two choices": route_to_less_loaded,
    "round robin": lambda request, router, rng: request.number % len(router.servers),
    "random": lambda request, router, rng: rng.randrange(len(router.servers)),
}


def make_routing_keys(chat: int, num_pages: int) -> list[bytes]:
    """Return the router's keys: of the common pages, or of the chat's own."""
    chat_key = (chat + 1).to_bytes(8, "little")
    return [
        (chat_key if depth * PAGE_TOKENS > COMMON_TOKENS else bytes(8))
        + depth.to_bytes(8, "little")
        for depth in KEY_DEPTHS
        if depth <= num_pages
    ]


def simulate_policy(
    name: str, chat_trace: ChatTrace, num_replicas: int, machine: ReplicaHardware, seed: int
) -> dict[str, Any]:
    """Serve the trace under one policy; return its row of the table."""
    router, rng = PrefixRouter[int](), random.Random(seed)
    for replica in range(num_replicas):
        router.add_server(replica)
    servers = [SimulatedReplica(machine) for _ in range(num_replicas)]
    stored = dict[int, int]()  # chat: tokens in the store
    running = list[tuple[int, int]]()  # heap of (time of the last token, replica)
    waits = np.zeros(len(chat_trace.times), np.int64)
    for number, (arrival, chat, num_prompt, num_reply) in enumerate(zip(*chat_trace, strict=True)):
        while running and running[0][0] <= arrival:
            router.finish_request(heapq.heappop(running)[1])
        num_pages = num_prompt // PAGE_TOKENS
        request = SimulatedRequest(number, make_routing_keys(chat, num_pages), num_pages)
        replica = POLICIES[name](request, router, rng)
        router.start_request(replica)
        first_token, last_token = servers[replica].serve(
            arrival, chat, num_prompt, num_reply, stored.get(chat, 0)
        )
        stored[chat] = (num_prompt + num_reply) // PAGE_TOKENS * PAGE_TOKENS
        servers[replica].cache_chat(chat, stored[chat])
        waits[number] = first_token - arrival
        heapq.heappush(running, (last_token, replica))
        if number % 10_000 == 0:
            label = f"{name}, {num_replicas} replicas"
            harness.show_progress(f"{label}: {number:,} of {len(waits):,} requests")
    num_kept = sum(server.num_kept for server in servers)
    num_restored = sum(server.num_restored for server in servers)
    num_computed = sum(server.num_computed for server in servers)
    percent = 100 / sum(chat_trace.prompts)
    work = num_computed / machine.reads + sum(chat_trace.replies) / machine.writes
    seconds = chat_trace.times[-1] / MICROSECONDS
    median, p99 = (float(np.percentile(waits, q)) / MICROSECONDS for q in (50, 99))
    return {
        "replicas": num_replicas,
        "policy": name,
        "kept_percent": num_kept * percent,
        "restored_percent": num_restored * percent,
        "computed_percent": num_computed * percent,
        "busiest": max(server.num_requests for server in servers) * num_replicas / len(waits),
        "busy_percent": 100 * work / seconds / num_replicas,
        "first_s": median,
        "first_s_p99": p99,
        "store_gb_s": num_restored * machine.bytes_a_token / 1e9 / seconds,
    }


def main(
    replicas: Annotated[str, typer.Option(help="Numbers of replicas to simulate")] = "100",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests at the largest number of replicas")
    ] = 1_000_000,
    rate: Annotated[float, typer.Option(help="Requests per second and replica")] = 1.2,
    reads: Annotated[int, typer.Option(min=1, help="Prompt tokens per second")] = 20_000,
    writes: Annotated[int, typer.Option(min=1, help="Reply tokens per second")] = 4_000,
    bytes_a_token: Annotated[
        int, typer.Option(min=1, help="Cache bytes per token, see `kvant plan`")
    ] = 78_336,
    max_bytes: Annotated[str, typer.Option(help="Cached prefixes per replica")] = "120GB",
    store: Annotated[str, typer.Option(help="Bytes per second from a store; 0: none")] = "10GB",
    seed: int = 0,
    json: harness.Json = False,
) -> None:
    """Simulate how routing to replicas affects prefix reuse and waiting times."""
    counts = harness.parse_numbers("replicas", replicas, 1)
    machine = ReplicaHardware(
        reads, writes, bytes_a_token, parse_size(max_bytes), parse_size(store)
    )
    if rate <= 0:
        raise ValueError(f"--rate {rate}: more than 0 requests are needed")
    if machine.max_bytes < MAX_PROMPT_TOKENS * bytes_a_token:
        raise ValueError(
            f"--max-bytes {max_bytes}: one prompt of {MAX_PROMPT_TOKENS:,} tokens takes "
            f"{format_size(MAX_PROMPT_TOKENS * bytes_a_token)}"
        )
    rows = []
    for count in counts:
        trace = make_trace(max(1, requests * count // max(counts)), rate * count, seed)
        rows += [simulate_policy(name, trace, count, machine, seed) for name in POLICIES]
    facts = {
        "requests": requests,
        "rate": rate,
        **asdict(machine),
        "restores": machine.restores_faster,
    }
    harness.print_report("scale", rows, facts, quiet=json)


if __name__ == "__main__":
    harness.run(main)
