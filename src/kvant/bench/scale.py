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
from kvant.bench.report import Json, numbers, progress, run, show
from kvant.serve.routing import DEPTHS, Router
from kvant.sizes import format_size, parse_size

PAGE = 64  # tokens
COMMON = 512  # tokens with which all begin
LONGEST = 131_072  # tokens of a prompt: there a chat ends
MOST_REPLIED = 4096
FIRST, ADDED, REPLY, PAUSE = (8.51, 1.26), (6.97, 1.71), (5.34, 1.36), (4.88, 0.98)
GOES_ON = (0.31, 0.42, 0.51, 0.59, 0.59, 0.68, 0.77)  # after the first turn, the second, …
TURNS = 1.63  # of a chat, by these
SECOND = 1_000_000  # microseconds


class Trace(NamedTuple):
    """Requests in the order in which they come."""

    times: list[int]  # microseconds
    chats: list[int]
    prompts: list[int]  # tokens
    replies: list[int]


def trace(requests: int, each_second: float, seed: int) -> Trace:
    """So many requests at about this rate."""
    draw = np.random.default_rng(seed)
    chat = np.arange(requests)
    at = draw.uniform(0, requests * TURNS / each_second, requests)
    prompt = np.clip(draw.lognormal(*FIRST, requests), COMMON + 1, LONGEST)
    rows = list[tuple[Any, Any, Any]]()
    while len(chat):
        rows.append((at, chat, prompt))
        on = draw.random(len(chat)) < GOES_ON[min(len(rows), len(GOES_ON)) - 1]
        at = at[on] + draw.lognormal(*PAUSE, on.sum())
        prompt = prompt[on] + draw.lognormal(*ADDED, on.sum())
        chat, fits = chat[on], prompt <= LONGEST
        at, chat, prompt = at[fits], chat[fits], prompt[fits]
    at, chat, prompt = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.argsort(at, kind="stable")[:requests]
    replies = np.clip(draw.lognormal(*REPLY, requests), 1, MOST_REPLIED)
    return Trace(
        (at[order] * SECOND).astype(int).tolist(),
        chat[order].tolist(),
        prompt[order].astype(int).tolist(),
        replies.astype(int).tolist(),
    )


@dataclass(frozen=True)
class Machine:
    """What a replica is able to do."""

    reads: int  # tokens of prompts a second
    writes: int  # tokens of replies a second, of all that it serves together
    bytes_a_token: int
    max_bytes: int  # of prefixes that it keeps
    store_bytes: int  # a second from the store; 0: there is none

    @property
    def restores(self) -> bool:
        """Is a token sooner restored than computed?"""
        return self.store_bytes > self.reads * self.bytes_a_token


class Replica:
    """Integers of one server: what it keeps, and until when it is busy."""

    def __init__(self, machine: Machine) -> None:
        self.requests = 0
        self.busy = 0  # until this microsecond
        self._machine = machine
        self._kept = OrderedDict[int, int]()  # tokens of chats, the newest last
        self._room = machine.max_bytes // machine.bytes_a_token

    def kept(self, chat: int) -> int:
        """Tokens with which it need not begin anew."""
        common = COMMON if self.requests else 0
        return max(common, self._kept.get(chat, 0))

    def serve(self, now: int, computed: int, restored: int, replied: int) -> tuple[int, int]:
        """When its first token comes, and its last one."""
        one = self._machine
        self.requests += 1
        ready = now + (restored * one.bytes_a_token * SECOND // one.store_bytes if restored else 0)
        first = max(ready, self.busy) + computed * SECOND // one.reads
        self.busy = first + replied * SECOND // one.writes
        return first, self.busy

    def keep(self, chat: int, tokens: int) -> None:
        """The chat that was used last is the last one to go."""
        self._room -= tokens - self._kept.pop(chat, 0)
        self._kept[chat] = tokens
        while self._room < 0:
            self._room += self._kept.popitem(last=False)[1]


class Policy(Protocol):
    """To which replica a request goes."""

    def choose(self, keys: Sequence[bytes], pages: int) -> int: ...

    def over(self, replica: int) -> None: ...


class Pages:
    """Where its pages are, as `kvant serve` does it."""

    def __init__(self, replicas: int, draw: random.Random) -> None:
        self._router = Router[int]()
        for replica in range(replicas):
            self._router.join(replica)

    def choose(self, keys: Sequence[bytes], pages: int) -> int:
        replica = self._router.ranked(keys, pages)[0]
        self._router.give(replica, keys)
        self._router.begin(replica)
        return replica

    def over(self, replica: int) -> None:
        self._router.end(replica)


class Turns:
    """One after the other."""

    def __init__(self, replicas: int, draw: random.Random) -> None:
        self._last, self._replicas = -1, replicas

    def choose(self, keys: Sequence[bytes], pages: int) -> int:
        self._last = (self._last + 1) % self._replicas
        return self._last

    def over(self, replica: int) -> None:
        pass


class Anyone:
    """Any of them."""

    def __init__(self, replicas: int, draw: random.Random) -> None:
        self._draw, self._replicas = draw, replicas

    def choose(self, keys: Sequence[bytes], pages: int) -> int:
        return self._draw.randrange(self._replicas)

    def over(self, replica: int) -> None:
        pass


class Idlest:
    """Of two the one with fewer requests under way, as Ray Serve does it by default."""

    def __init__(self, replicas: int, draw: random.Random) -> None:
        self._draw, self._under_way = draw, [0] * replicas

    def choose(self, keys: Sequence[bytes], pages: int) -> int:
        two = [self._draw.randrange(len(self._under_way)) for _ in range(2)]
        replica = min(two, key=self._under_way.__getitem__)
        self._under_way[replica] += 1
        return replica

    def over(self, replica: int) -> None:
        self._under_way[replica] -= 1


POLICIES: dict[str, Callable[[int, random.Random], Policy]] = {
    "pages": Pages,
    "two choices": Idlest,
    "round robin": Turns,
    "random": Anyone,
}


def keys_of(chat: int, pages: int) -> list[bytes]:
    """As the router has them: of the pages with which all begin, or of the chat's own."""
    own = (chat + 1).to_bytes(8, "little")
    return [
        (own if depth * PAGE > COMMON else bytes(8)) + depth.to_bytes(8, "little")
        for depth in DEPTHS
        if depth <= pages
    ]


def simulated(
    name: str, asked: Trace, replicas: int, machine: Machine, seed: int
) -> dict[str, Any]:
    """What one policy makes of the requests."""
    policy = POLICIES[name](replicas, random.Random(seed))
    servers = [Replica(machine) for _ in range(replicas)]
    stored = dict[int, int]()  # tokens by chat
    ends = list[tuple[int, int]]()
    tokens = {"kept": 0, "restored": 0, "computed": 0}
    waits = np.zeros(len(asked.times), np.int64)
    for number, (now, chat, prompt, reply) in enumerate(zip(*asked, strict=True)):
        while ends and ends[0][0] <= now:
            policy.over(heapq.heappop(ends)[1])
        pages = prompt // PAGE
        replica = policy.choose(keys_of(chat, pages), pages)
        server = servers[replica]
        most = (prompt - 1) // PAGE * PAGE  # one token is read at least
        kept = min(most, server.kept(chat))
        known = max(kept, min(most, stored.get(chat, 0))) if machine.restores else kept
        first, end = server.serve(now, prompt - known, known - kept, reply)
        whole = (prompt + reply) // PAGE * PAGE
        server.keep(chat, whole)
        stored[chat] = whole
        waits[number] = first - now
        heapq.heappush(ends, (end, replica))
        tokens["kept"] += kept
        tokens["restored"] += known - kept
        tokens["computed"] += prompt - known
        if number % 10_000 == 0:
            progress(f"{name}, {replicas} replicas: {number:,} of {len(asked.times):,} requests")
    progress("")
    return told(name, servers, tokens, waits, asked, machine)


def told(
    name: str,
    servers: Sequence[Replica],
    tokens: dict[str, int],
    waits: np.ndarray[Any, np.dtype[np.int64]],
    asked: Trace,
    machine: Machine,
) -> dict[str, Any]:
    """A row of the table."""
    total = sum(tokens.values())
    busiest = max(server.requests for server in servers) * len(servers) / len(waits)
    written = sum(asked.replies)
    work = tokens["computed"] / machine.reads + written / machine.writes
    seconds = asked.times[-1] / SECOND
    median, late = (float(np.percentile(waits, q)) / SECOND for q in (50, 99))
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
    counts = numbers("replicas", replicas)
    machine = Machine(reads, writes, bytes_a_token, parse_size(max_bytes), parse_size(store))
    if min(counts) < 1 or rate <= 0:
        raise ValueError("--replicas and --rate: more than 0 are needed")
    if machine.max_bytes < LONGEST * bytes_a_token:
        raise ValueError(
            f"--max-bytes {max_bytes}: one prompt of {LONGEST:,} tokens takes "
            f"{format_size(LONGEST * bytes_a_token)}"
        )
    rows = []
    for count in counts:
        asked = trace(max(1, requests * count // max(counts)), rate * count, seed)
        rows += [simulated(name, asked, count, machine, seed) for name in POLICIES]
    facts = {"requests": requests, "rate": rate, **asdict(machine), "restores": machine.restores}
    show("scale", rows, facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
