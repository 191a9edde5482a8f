"""What a store of prefixes costs those who decode, and how soon a prefix is back from it.

A model of a known shape decodes behind a cache of random rows. Some of its pages are written to the
store in the meantime, and then as many steps are decoded while nothing is; `beside` is the mean of
the first over the mean of the others, the median over the rounds. Then all pages are written while
nobody decodes, and read into an empty cache, as after a restart.
"""

from __future__ import annotations

import secrets
import statistics
import time
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from kvant.bench.cache_race import SHAPES, filled, opened, random_rows
from kvant.bench.device import CPU
from kvant.bench.report import Json, progress, run, show
from kvant.hf import HostCache
from kvant.prefixes import Waiting
from kvant.prefixes.archive import Archive
from kvant.prefixes.keys import PAGE
from kvant.stores import open_tiers

PART = 512  # tokens whose pages are written while somebody decodes


class Rounds:
    """A cache that is written and read again and again."""

    def __init__(self, model: Any, spec: str, context: int, store: str) -> None:
        self.decoding = filled(model, spec, *random_rows(model, context))
        self.model, self.tokens = model, list(range(context))
        self.cache: HostCache = self.decoding.cache.fork()
        self.archive = Archive(open_tiers(store))
        self.steps: list[float] = []
        self.beside: list[float] = []  # a step beside the writer, by the round, in steps
        self.written: list[float] = []
        self.read: list[float] = []

    def once(self) -> None:
        behind, slow = self.archive.tiers.behind, []
        self.write(upto=PART)
        while behind.nbytes:
            slow.append(self.step())
        behind.flush()
        alone = [self.step() for _ in slow]
        self.steps += alone
        self.beside.append(statistics.mean(slow) / statistics.mean(alone))
        begin = time.perf_counter()
        root = self.write()
        behind.flush()
        self.written.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        prompt = [*self.tokens, 0]  # one token more: what is asked for is never all of it
        found = next(self.archive.find(root, prompt, self.cache.states, 0, suffice=True))
        empty = self.cache.fork()
        empty.reset()
        restored = self.archive.read(found, prompt, empty, self.model.device, Waiting())
        if restored is None or len(restored.tokens) < len(self.tokens) // PAGE * PAGE:
            raise RuntimeError(f"{self.archive.stats()}: it was not read back")
        self.read.append(time.perf_counter() - begin)

    def write(self, upto: int | None = None) -> bytes:
        """Write later what there is of so many tokens, under a name that nobody has."""
        root = secrets.token_bytes(32)
        self.archive.write(root, self.tokens, self.cache.states, 0, {}, suffice=True, upto=upto)
        return root

    def step(self) -> float:
        self.decoding.decode()
        return self.decoding.seconds[-1]

    def forget(self) -> None:
        for seconds in (self.steps, self.beside, self.written, self.read):
            seconds.clear()

    def figures(self, store: str | None) -> dict[str, Any]:
        median = statistics.median
        return {
            "store": "folder" if store is None else store.partition(":")[0],
            "step_ms": 1e3 * median(self.steps),
            "beside": median(self.beside),
            "steps_beside": len(self.steps),
            "write_ms": 1e3 * median(self.written),
            "read_ms": 1e3 * median(self.read),
        }


@torch.no_grad()
def main(
    context: Annotated[int, typer.Option(min=64, help="tokens of the prefix")] = 8192,
    kv_cache: Annotated[str, typer.Option(help="of the spec language")] = "affine8",
    repeats: Annotated[int, typer.Option(min=1, help="times it is written and read")] = 5,
    shape: Annotated[str, typer.Option(help=", ".join(SHAPES))] = "0.6b",
    layers: Annotated[int | None, typer.Option(min=1, help="those of the shape")] = None,
    store: Annotated[str | None, typer.Option(help="a URL; else a folder that is deleted")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of torch; its own default")] = None,
    json: Json = False,
) -> None:
    """What decoding beside a writer costs, and how soon a prefix is back."""
    model, sizes = opened(shape, layers, threads)
    with TemporaryDirectory(prefix="kvant-") as folder:
        rounds = Rounds(model, kv_cache, context, store or folder)
        for number in range(repeats + 1):
            progress(f"round {number} of {repeats}")
            rounds.once()
            if not number:  # what is done once
                rounds.forget()
        rounds.archive.close()
    progress("")
    facts = {
        "model": f"{shape}, random",
        "layers": sizes["num_hidden_layers"],
        "context": context,
        "cache": kv_cache,
        "mib": rounds.cache.states.nbytes_used / 2**20,
    }
    show("stores", [rounds.figures(store)], facts, quiet=json, device=CPU)


if __name__ == "__main__":
    run(main)
