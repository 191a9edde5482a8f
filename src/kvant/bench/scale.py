"""What routing gives where many replicas serve: a simulation, in integers, of a trace of chats.

Its shape is that of an hour of a public chat (12,031 requests, FAST'25, Mooncake's conversations):
all begin with the same 512 tokens; first prompts, what a turn adds, replies and pauses are
log-normal, by the logarithms there; 31% of first turns have a second one, and more later ones.
A replica reads prompts one after the other and keeps what it can; a store, if there is one, has all
of it. Every policy is given the same requests.
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

PAGE_TOKENS = 64  # tokens
COMMON_TOKENS = 512  # tokens with which all begin
MAX_PROMPT_TOKENS = 131_072  # tokens of a prompt: there a chat ends
MAX_REPLY_TOKENS = 4096
FIRST_PROMPT_LOGNORMAL, TURN_LOGNORMAL, REPLY_LOGNORMAL, PAUSE_LOGNORMAL = (
    (8.51, 1.26),
    (6.97, 1.71),
    (5.34, 1.36),
    (4.88, 0.98),
)
CONTINUE_PROBABILITIES = (
    0.31,
    0.42,
    0.51,
    0.59,
    0.59,
    0.68,
    0.77,
)  # after the first turn, the second, …
MEAN_TURNS = 1.63  # of a chat, by these
MICROSECONDS = 1_000_000  # microseconds


class ChatTrace(NamedTuple):
    """Requests in the order in which they come."""

    times: list[int]  # microseconds
    chats: list[int]
    prompts: list[int]  # tokens
    replies: list[int]


def make_trace(num_requests: int, rate: float, seed: int) -> ChatTrace:
    """So many requests at about this rate."""
    draw = np.random.default_rng(seed)
    chat = np.arange(num_requests)
    at = draw.uniform(0, num_requests * MEAN_TURNS / rate, num_requests)
    prompt = np.clip(
        draw.lognormal(*FIRST_PROMPT_LOGNORMAL, num_requests), COMMON_TOKENS + 1, MAX_PROMPT_TOKENS
    )
    rows = list[tuple[Any, Any, Any]]()
    while len(chat):
        rows.append((at, chat, prompt))
        on = (
            draw.random(len(chat))
            < CONTINUE_PROBABILITIES[min(len(rows), len(CONTINUE_PROBABILITIES)) - 1]
        )
        at = at[on] + draw.lognormal(*PAUSE_LOGNORMAL, on.sum())
        prompt = prompt[on] + draw.lognormal(*TURN_LOGNORMAL, on.sum())
        chat, fits = chat[on], prompt <= MAX_PROMPT_TOKENS
        at, chat, prompt = at[fits], chat[fits], prompt[fits]
    at, chat, prompt = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.argsort(at, kind="stable")[:num_requests]
    replies = np.clip(draw.lognormal(*REPLY_LOGNORMAL, num_requests), 1, MAX_REPLY_TOKENS)
    return ChatTrace(
        (at[order] * MICROSECONDS).astype(int).tolist(),
        chat[order].tolist(),
        prompt[order].astype(int).tolist(),
        replies.astype(int).tolist(),
    )


@dataclass(frozen=True)
class ReplicaHardware:
    """What a replica is able to do."""

    reads: int  # tokens of prompts a second
    writes: int  # tokens of replies a second, of all that it serves together
    bytes_a_token: int
    max_bytes: int  # of prefixes that it keeps
    store_bytes: int  # a second from the store; 0: there is none

    @property
    def restores_faster(self) -> bool:
        """Is a token sooner restored than computed?"""
        return self.store_bytes > self.reads * self.bytes_a_token


class SimulatedReplica:
    """Integers of one server: what it keeps, and until when it is busy."""

    def __init__(self, machine: ReplicaHardware) -> None:
        self.num_requests = 0
        self.busy_until = 0  # until this microsecond
        self._machine = machine
        self._cached_chats = OrderedDict[int, int]()  # tokens of chats, the newest last
        self._num_free_tokens = machine.max_bytes // machine.bytes_a_token

    def count_cached_tokens(self, chat: int) -> int:
        """Tokens with which it need not begin anew."""
        common = COMMON_TOKENS if self.num_requests else 0
        return max(common, self._cached_chats.get(chat, 0))

    def serve(
        self, now: int, num_computed: int, num_restored: int, num_replied: int
    ) -> tuple[int, int]:
        """When its first token comes, and its last one."""
        one = self._machine
        self.num_requests += 1
        ready = now + (
            num_restored * one.bytes_a_token * MICROSECONDS // one.store_bytes
            if num_restored
            else 0
        )
        first = max(ready, self.busy_until) + num_computed * MICROSECONDS // one.reads
        self.busy_until = first + num_replied * MICROSECONDS // one.writes
        return first, self.busy_until

    def cache_chat(self, chat: int, num_tokens: int) -> None:
        """The chat that was used last is the last one to go."""
        self._num_free_tokens -= num_tokens - self._cached_chats.pop(chat, 0)
        self._cached_chats[chat] = num_tokens
        while self._num_free_tokens < 0:
            self._num_free_tokens += self._cached_chats.popitem(last=False)[1]


class RoutingPolicy(Protocol):
    """To which replica a request goes."""

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int: ...

    def finish_request(self, replica: int) -> None: ...


class PagePolicy:
    """Where its pages are, as `kvant serve` does it."""

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
    """One after the other."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._last, self._replicas = -1, replicas

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        self._last = (self._last + 1) % self._replicas
        return self._last

    def finish_request(self, replica: int) -> None:
        pass


class RandomPolicy:
    """Any of them."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._generator, self._replicas = generator, replicas

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        return self._generator.randrange(self._replicas)

    def finish_request(self, replica: int) -> None:
        pass


class TwoChoicesPolicy:
    """Of two the one with fewer requests under way, as Ray Serve does it by default."""

    def __init__(self, replicas: int, generator: random.Random) -> None:
        self._generator, self._num_ongoing = generator, [0] * replicas

    def choose_replica(self, keys: Sequence[bytes], num_pages: int) -> int:
        two = [self._generator.randrange(len(self._num_ongoing)) for _ in range(2)]
        replica = min(two, key=self._num_ongoing.__getitem__)
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
    """As the router has them: of the pages with which all begin, or of the chat's own."""
    own = (chat + 1).to_bytes(8, "little")
    return [
        (own if depth * PAGE_TOKENS > COMMON_TOKENS else bytes(8)) + depth.to_bytes(8, "little")
        for depth in KEY_DEPTHS
        if depth <= num_pages
    ]


def simulate_policy(
    name: str, chat_trace: ChatTrace, num_replicas: int, machine: ReplicaHardware, seed: int
) -> dict[str, Any]:
    """What one policy makes of the requests."""
    policy = POLICIES[name](num_replicas, random.Random(seed))
    servers = [SimulatedReplica(machine) for _ in range(num_replicas)]
    stored = dict[int, int]()  # tokens by chat
    ends = list[tuple[int, int]]()
    tokens = {"kept": 0, "restored": 0, "computed": 0}
    waits = np.zeros(len(chat_trace.times), np.int64)
    for number, (now, chat, prompt, reply) in enumerate(zip(*chat_trace, strict=True)):
        while ends and ends[0][0] <= now:
            policy.finish_request(heapq.heappop(ends)[1])
        pages = prompt // PAGE_TOKENS
        replica = policy.choose_replica(make_routing_keys(chat, pages), pages)
        server = servers[replica]
        most = (prompt - 1) // PAGE_TOKENS * PAGE_TOKENS  # one token is read at least
        kept = min(most, server.count_cached_tokens(chat))
        known = max(kept, min(most, stored.get(chat, 0))) if machine.restores_faster else kept
        first, end = server.serve(now, prompt - known, known - kept, reply)
        whole = (prompt + reply) // PAGE_TOKENS * PAGE_TOKENS
        server.cache_chat(chat, whole)
        stored[chat] = whole
        waits[number] = first - now
        heapq.heappush(ends, (end, replica))
        tokens["kept"] += kept
        tokens["restored"] += known - kept
        tokens["computed"] += prompt - known
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
    """A row of the table."""
    total = sum(tokens.values())
    busiest = max(server.num_requests for server in servers) * len(servers) / len(waits)
    written = sum(chat_trace.replies)
    work = tokens["computed"] / machine.reads + written / machine.writes
    seconds = chat_trace.times[-1] / MICROSECONDS
    median, late = (float(np.percentile(waits, q)) / MICROSECONDS for q in (50, 99))
    return {
        "replicas": len(servers),
        "policy": name,
        **{f"{kind}_percent": 100 * count / total for kind, count in tokens.items()},
        "busiest": busiest,
        "busy_percent": 100 * work / seconds / len(servers),
        "first_s": median,
        "first_s_p99": late,
        "store_gb_s": tokens["restored"] * machine.bytes_a_token / 1e9 / seconds,
    }


def main(
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, each simulated.")] = "100",
    requests: Annotated[int, typer.Option(min=1, help="Of the largest number.")] = 1_000_000,
    rate: Annotated[float, typer.Option(help="Requests a second and replica.")] = 1.2,
    reads: Annotated[int, typer.Option(min=1, help="Tokens of prompts a second.")] = 20_000,
    writes: Annotated[int, typer.Option(min=1, help="Tokens of replies a second.")] = 4_000,
    bytes_a_token: Annotated[int, typer.Option(min=1, help="Of a cache: `kvant plan`.")] = 78_336,
    max_bytes: Annotated[str, typer.Option(help="Of prefixes that a replica keeps.")] = "120GB",
    store: Annotated[str, typer.Option(help="Bytes a second from it; 0: none.")] = "10GB",
    seed: int = 0,
    json: Json = False,
) -> None:
    """Simulate how requests go to replicas: what they find there, and who waits."""
    counts = parse_numbers("replicas", replicas)
    machine = ReplicaHardware(
        reads, writes, bytes_a_token, parse_size(max_bytes), parse_size(store)
    )
    if min(counts) < 1 or rate <= 0:
        raise ValueError("--replicas and --rate: more than 0 are needed")
    if machine.max_bytes < MAX_PROMPT_TOKENS * bytes_a_token:
        raise ValueError(
            f"--max-bytes {max_bytes}: one prompt of {MAX_PROMPT_TOKENS:,} tokens takes "
            f"{format_size(MAX_PROMPT_TOKENS * bytes_a_token)}"
        )
    rows = []
    for count in counts:
        asked = make_trace(max(1, requests * count // max(counts)), rate * count, seed)
        rows += [simulate_policy(name, asked, count, machine, seed) for name in POLICIES]
    facts = {
        "requests": requests,
        "rate": rate,
        **asdict(machine),
        "restores": machine.restores_faster,
    }
    print_report("scale", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
