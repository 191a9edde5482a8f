"""`kvant doctor`: what runs here, why the rest does not, and a test of it that takes a second."""

from __future__ import annotations

import json as json_text
import os
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

import torch
from packaging.requirements import Requirement
from typer import Option

from kvant.attention import attend
from kvant.attention.attending import BACKENDS
from kvant.bench.report import machine
from kvant.cache import Cache
from kvant.cli import options
from kvant.cli.options import blank
from kvant.contracts import View
from kvant.devices import list_slow_dtypes
from kvant.native import library
from kvant.packed import FEW, Order, PackedMatrix, explain_refusal
from kvant.sizes import format_size

EXTRAS = ("server", "ray", "redis", "object", "grammar", "plot", "gpu")
FORMATS = ("raw", "affine8", "affine4", "affine3", "fp8", "turbo4", "turbo3")
HEADS, TOKENS, DIM = 2, 300, 64
FAR = 1e-3  # between backends: float32 in another order is closer by far


def doctor(
    kernels: Annotated[
        bool, Option("--kernels", help="Fail where no kernel runs on the processor.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Say what runs on this machine and what does not, and test the kernels."""
    begin = time.perf_counter()
    tested = [row for device in _devices() for row in _tested(device)]
    told = {
        "kvant": version("kvant"),
        "transformers": version("transformers"),
        **machine(),
        "memory": _memory(),
        "kernels": library().isa or library().reason,
        "packed_weights": _packs(),
        "slow_dtypes": list_slow_dtypes(),
        "gpu": _gpu(),
        "backends": {device: _backends(device) for device in _devices()},
        "extras": dict(_extras()),
        "self_test": tested,
        "seconds": time.perf_counter() - begin,
        "healthy": all(row["difference"] < FAR for row in tested),
    }
    if json:
        print(json_text.dumps(told))
    else:
        _show(told)
    if not told["healthy"] or (kernels and library().functions is None):
        raise SystemExit(1)


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _view(spec: str, device: str) -> View:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator).to(device)
    made: View = Cache(1, spec)[0].append(*rows)
    return made


def _backends(device: str) -> dict[str, str | None]:
    """Why each does not read affine4 rows there; None of those that do."""
    view = _view("affine4", device)
    return {one.name: one.supports(view, None) for one in BACKENDS}


def _tested(device: str) -> Iterator[dict[str, Any]]:
    """How far each fast backend is from the reference."""
    q = torch.randn(1, 2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(1)).to(device)
    for spec in FORMATS:
        view = _view(spec, device)
        right = attend(q, view, backend="reference")
        for one in BACKENDS[:2]:
            if one.supports(view, None) is None:
                apart = (attend(q, view, backend=one.name) - right).abs().max().item()
                yield {"format": spec, "device": device, "backend": one.name, "difference": apart}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not of this system
        return None


def _packs() -> str:
    """What `kvant.pack` does with weights in bfloat16 here."""
    if (reason := explain_refusal(torch.bfloat16)) is not None:
        return f"no: {reason}"
    drawn = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    matrix = PackedMatrix(drawn.bfloat16(), Order())
    kernel = matrix.kernel_part(torch.ones(1, 256).bfloat16(), None)
    return f"yes, and up to {FEW} rows by our kernel" if kernel else "yes, computed by oneDNN"


def _gpu() -> str:
    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"none that torch {torch.__version__} finds"
    found = (torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count()))
    return ", ".join(f"{one.name}, {format_size(one.total_memory)}" for one in found)


def _extras() -> Iterator[tuple[str, list[str]]]:
    """What each extra lacks."""
    try:
        every = [Requirement(text) for text in requires("kvant") or ()]
    except PackageNotFoundError:  # run from a folder
        return
    for extra in EXTRAS:
        yield extra, [str(one.name) for one in _wanted(every, extra) if not _is_here(one)]


def _wanted(every: list[Requirement], extra: str) -> Iterator[Requirement]:
    for one in every:
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        if one.marker.evaluate({"extra": ""}):  # wanted anyway
            continue
        if one.name == "kvant":
            for other in one.extras:
                yield from _wanted(every, other)
        else:
            yield one


def _is_here(one: Requirement) -> bool:
    try:
        return one.specifier.contains(version(one.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _show(told: dict[str, Any]) -> None:
    console, table = blank()
    table.show_header = False
    table.add_column(no_wrap=True)
    memory = "" if told["memory"] is None else f", {format_size(told['memory'])} of memory"
    table.add_row(
        "versions",
        f"kvant {told['kvant']}, torch {told['torch']}, transformers {told['transformers']}, "
        f"Python {told['python']}, {told['system']}",
    )
    table.add_row(
        "processor",
        f"{told['processor']}, {told['cores']} cores, {told['threads']} threads of torch{memory}",
    )
    table.add_row("GPU", told["gpu"])
    table.add_row("kernels", told["kernels"])
    table.add_row("packed weights", told["packed_weights"])
    slow = " and ".join(told["slow_dtypes"])
    reads = f"{slow} read prompts slower than float32: --dtype float32" if slow else "none is slow"
    table.add_row("dtypes", reads)
    for device, backends in told["backends"].items():
        first = next(name for name, reason in backends.items() if reason is None)
        for name, reason in backends.items():
            used = "reads rows, and is what is taken" if name == first else "reads rows if asked to"
            table.add_row(f"{name} on {device}", f"does not: {reason}" if reason else used)
    for extra, missing in told["extras"].items():
        lacking = f"without {', '.join(missing)}: pip install 'kvant[{extra}]'"
        table.add_row(f"kvant[{extra}]", lacking if missing else "installed")
    console.print(table)
    far = [row for row in told["self_test"] if row["difference"] >= FAR]
    for row in far:
        console.print(
            f"WRONG: {row['backend']} on {row['device']} is {row['difference']:.2g} from the "
            f"reference with {row['format']} rows",
            soft_wrap=True,
        )
    if not far:
        most = max((row["difference"] for row in told["self_test"]), default=None)
        agree = f"{len(told['self_test'])} kernels agree with the reference, to {most or 0:.1g}"
        none = "there is no kernel to compare, the reference computes"
        said = none if most is None else agree
        console.print(f"self-test: {said}, in {told['seconds']:.1f} s", soft_wrap=True)
