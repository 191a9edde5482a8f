"""Print the way of one decoded token, or of one request, through src/kvant.

`python tools/walk.py token` generates with the model inside and prints each function of kvant that
one token enters, in order, with the number of distinct functions and files. The token is one of the
first, before forwards are captured and replayed; `--after N` traces a later one.

`python tools/walk.py request` sends one chat request to the server and prints the classes of kvant
that it creates instances of, in all threads. Objects of the start are not counted. A star marks the
objects that make up the request: those of `REQUEST_FOLDERS` alive when its first token is sampled.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from weakref import ref

import typer

import kvant
from kvant import demo

PACKAGE = Path(kvant.__file__).parent
REQUEST_FOLDERS = "kvant.engine.", "kvant.generation.", "kvant.server."
ACTIONS = "kvant.engine.scheduler."  # of one step each, no part of a request
app = typer.Typer(add_completion=False, help=__doc__)


@dataclass
class Trace:
    """Functions of kvant in the order in which they were entered first, and objects by class."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)  # by file and function
    depths: dict[tuple[str, str], int] = field(default_factory=dict)  # at the first call
    objects: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)  # of the request, by class
    depth: int = 0
    is_active: bool = True
    alive: dict[int, ref[Any]] = field(default_factory=dict)  # objects by id

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call or a return, as `sys.setprofile` reports them."""
        code = frame.f_code
        if not self.is_active or event not in ("call", "return"):
            return
        if event == "call" and code.co_name == "__init__":
            self._record_object(frame.f_locals.get("self"))
        elif code.co_name == "sample_tokens" and event == "call" and not self.parts:
            alive = [value() for value in self.alive.values()]
            alive = [value for value in alive if value is not None]
            names = [f"{type(value).__module__}.{type(value).__qualname__}" for value in alive]
            names = [name for name in names if name.startswith(REQUEST_FOLDERS)]
            self.parts.update(name for name in names if not name.startswith(ACTIONS))
        path = Path(code.co_filename)
        if not path.is_relative_to(PACKAGE) or code.co_name.startswith("<"):
            return
        if event == "return":
            self.depth -= 1
            return
        name = path.relative_to(PACKAGE).as_posix(), code.co_qualname
        self.depths.setdefault(name, self.depth)
        self.calls[name] += 1
        self.depth += 1

    def _record_object(self, value: Any) -> None:
        kind = type(value)
        if kind.__module__.partition(".")[0] == "kvant":
            self.objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
            with suppress(TypeError):  # a few classes have no weak references
                self.alive[id(value)] = ref(value)


@app.command()
def token(
    kv_cache: Annotated[str, typer.Option(help="spec of the cache")] = "affine8",
    after: Annotated[int, typer.Option(min=1, help="tokens that are decoded before it")] = 2,
    quiet: Annotated[bool, typer.Option(help="print the counts only")] = False,
) -> None:
    """Print the functions that one decoded token enters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(demo.PATH)
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    steps = iter(
        kvant.generate(model, tokenizer, "def main", kv_cache=kv_cache, max_new_tokens=after + 2)
    )
    for _ in range(after):
        next(steps)
    trace = Trace()
    sys.setprofile(trace)
    next(steps)
    sys.setprofile(None)
    if not quiet:
        for (path, function), depth in trace.depths.items():
            calls = trace.calls[path, function]
            print(f"{'  ' * depth}{path}: {function}{f' x{calls}' if calls > 1 else ''}")
    files = {path for path, _ in trace.depths}
    counts = {"files": len(files), "functions": len(trace.depths), "calls": trace.calls.total()}
    print(json.dumps(counts))


@app.command()
def request(
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens of the reply")] = 4,
) -> None:
    """Print the classes of kvant of which one request creates instances."""
    from fastapi.testclient import TestClient

    from kvant import Engine, checkpoints
    from kvant.prefixes import Prefixes
    from kvant.server import ApiKeys, Service, create_app

    trace = Trace(is_active=False)
    threading.setprofile(trace)  # of the threads that start from now on
    model, tokenizer = checkpoints.load(None)
    body = {"messages": [{"role": "user", "content": "import os"}], "max_tokens": max_tokens}
    with Engine(model, tokenizer, "affine8", prefixes=Prefixes("64MiB")) as engine:
        client = TestClient(create_app(Service(engine, "inside", ApiKeys()), "testserver"))
        for trace.is_active in (False, True):  # the first request allocates what all share
            client.post("/v1/chat/completions", json=body).raise_for_status()
    threading.setprofile(None)
    trace.is_active = False
    for name, count in sorted(trace.objects.items()):
        print(f"{count:4} {'*' if name in trace.parts else ' '} {name}")
    counts = {"classes": len(trace.objects), "objects": trace.objects.total()}
    print(json.dumps(counts | {"parts": len(trace.parts), "part_objects": trace.parts.total()}))


if __name__ == "__main__":
    app()
