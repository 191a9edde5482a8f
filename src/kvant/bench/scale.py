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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import typer

from kvant.bench.device import CPU
from kvant.bench.report import Json, parse_numbers, print_report, run, show_progress
from kvant.serve.routing import KEY_DEPTHS, PrefixRouter
from kvant.sizes import format_size, parse_size

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
    """A replica's cached chats, and the time when it is idle again."""

    def __init__(self, machine: ReplicaHardware) -> None:
        self.num_requests = 0
        self.busy_until = 0  # microseconds
        self._machine = machine
        self._cached_chats = OrderedDict[int, int]()  # chat: tokens, least recently used first
        self._num_free_tokens = machine.max_bytes // machine.bytes_a_token

    def count_cached_tokens(self, chat: int) -> int:
        """Return the tokens of a chat's prefix in the cache."""
        common = COMMON_TOKENS if self.num_requests else 0
        return max(common, self._cached_chats.get(chat, 0))

    def serve(
        self, now: int, num_computed: int, num_restored: int, num_replied: int
    ) -> tuple[int, int]:
        """Return the times of the first and the last reply token."""
        machine = self._machine
        self.num_requests += 1
        ready = now + (
            num_restored * machine.bytes_a_token * MICROSECONDS // machine.store_bytes
            if num_restored
            else 0
        )
        first_token = max(ready, self.busy_until) + num_computed * MICROSECONDS // machine.reads
        self.busy_until = first_token + num_replied * MICROSECONDS // machine.writes
        return first_token, self.busy_until

    def cache_chat(self, chat: int, num_tokens: int) -> None:
        """Cache a chat as the most recently used; evict the least recently used ones."""
        self._num_free_tokens -= num_tokens - self._cached_chats.pop(chat, 0)
        self._cached_chats[chat] = num_tokens
        while self._num_free_tokens < 0:
            self._num_free_tokens += self._cached_chats.popitem(last=False)[1]


class RoutingPolicy(Protocol):
    """Chooses the replica of a request."""

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int: ...

    def finish_request(self, replica: int) -> None: ...


class PagePolicy:
    """Route by cached pages, as `kvant serve` does."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._router = PrefixRouter[int]()
        for replica in range(replicas):
            self._router.add_server(replica)

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        replica = self._router.rank_servers(keys, num_pages)[0]
        self._router.assign_request(replica, keys)
        self._router.start_request(replica)
        return replica

    def finish_request(self, replica: int) -> None:
        self._router.finish_request(replica)


class RoundRobinPolicy:
    """Route to one replica after the other."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._last, self._replicas = -1, replicas

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        self._last = (self._last + 1) % self._replicas
        return self._last

    def finish_request(self, replica: int) -> None:
        pass


class RandomPolicy:
    """Route at random."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._generator, self._replicas = generator, replicas

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        return self._generator.randrange(self._replicas)

    def finish_request(self, replica: int) -> None:
        pass


class TwoChoicesPolicy:
    """Route to the less loaded of two random replicas, as Ray Serve does by default."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._generator, self._num_ongoing = generator, [0] * replicas

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        candidates = [self._generator.randrange(len(self._num_ongoing)) for _ in range(2)]
        replica = min(candidates, key=self._num_ongoing.__getitem__)
        self._num_ongoing[replica] += 1
        return replica

    def finish_request(self, replica: int) -> None:
        self._num_ongoing[replica] -= 1


POLICIES: dict[str, Callable[[int, random.Random], RoutingPolicy]] = {
    "pages": PagePolicy,
    "two choices": TwoChoicesPolicy,
    "round robin": RoundRobinPolicy,
    "random": RandomPolicy,
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
    policy = POLICIES[name](num_replicas, random.Random(seed))
    servers = [SimulatedReplica(machine) for _ in range(num_replicas)]
    stored = dict[int, int]()  # chat: tokens in the store
    running = list[tuple[int, int]]()  # heap of (time of the last token, replica)
    tokens = {"kept": 0, "restored": 0, "computed": 0}
    waits = np.zeros(len(chat_trace.times), np.int64)
    for number, (arrival, chat, num_prompt, num_reply) in enumerate(zip(*chat_trace, strict=True)):
        while running and running[0][0] <= arrival:
            policy.finish_request(heapq.heappop(running)[1])
        num_pages = num_prompt // PAGE_TOKENS
        replica = policy.choose_replica(make_routing_keys(chat, num_pages), num_pages)
        server = servers[replica]
        max_cached = (num_prompt - 1) // PAGE_TOKENS * PAGE_TOKENS  # one token is always computed
        num_cached = min(max_cached, server.count_cached_tokens(chat))
        num_stored = min(max_cached, stored.get(chat, 0)) if machine.restores_faster else 0
        num_restored = max(0, num_stored - num_cached)
        num_computed = num_prompt - num_cached - num_restored
        first_token, last_token = server.serve(arrival, num_computed, num_restored, num_reply)
        num_total = (num_prompt + num_reply) // PAGE_TOKENS * PAGE_TOKENS
        server.cache_chat(chat, num_total)
        stored[chat] = num_total
        waits[number] = first_token - arrival
        heapq.heappush(running, (last_token, replica))
        tokens["kept"] += num_cached
        tokens["restored"] += num_restored
        tokens["computed"] += num_computed
        if number % 10_000 == 0:
            show_progress(
                f"{name}, {num_replicas} replicas: {number:,} of {len(chat_trace.times):,} requests"
            )
    show_progress("")
    return make_row(name, servers, tokens, waits, chat_trace, machine)


def make_row(
    name: str,
    servers: Sequence[SimulatedReplica],
    tokens: dict[str, int],
    waits: np.ndarray[Any, np.dtype[np.int64]],
    chat_trace: ChatTrace,
    machine: ReplicaHardware,
) -> dict[str, Any]:
    """Return the policy's row of the table."""
    total = sum(tokens.values())
    busiest = max(server.num_requests for server in servers) * len(servers) / len(waits)
    num_replied = sum(chat_trace.replies)
    work = tokens["computed"] / machine.reads + num_replied / machine.writes
    seconds = chat_trace.times[-1] / MICROSECONDS
    median, p99 = (float(np.percentile(waits, q)) / MICROSECONDS for q in (50, 99))
    return {
        "replicas": len(servers),
        "policy": name,
        **{f"{kind}_percent": 100 * count / total for kind, count in tokens.items()},
        "busiest": busiest,
        "busy_percent": 100 * work / seconds / len(servers),
        "first_s": median,
        "first_s_p99": p99,
        "store_gb_s": tokens["restored"] * machine.bytes_a_token / 1e9 / seconds,
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
    json: Json = False,
) -> None:
    """Simulate how routing to replicas affects prefix reuse and waiting times."""
    counts = parse_numbers("replicas", replicas)
    machine = ReplicaHardware(
        reads, writes, bytes_a_token, parse_size(max_bytes), parse_size(store)
    )
    if min(counts) < 1 or rate <= 0:
        raise ValueError("--replicas and --rate: both must be more than 0")
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
    print_report("scale", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
