"""`kvant doctor`: list the kernels, devices and extras of this machine, and test the kernels."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Annotated, Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from typer import Option

from kvant.cli import options, print_json
from kvant.platform.devices import describe_processor, list_slow_dtypes
from kvant.platform.sizes import format_size
from kvant.platform.terminal import make_table

if TYPE_CHECKING:
    from kvant.contracts import View

EXTRAS = ("gguf", "server", "ray", "redis", "object", "grammar", "vision", "plot", "otel", "gpu")
LABEL_WIDTH = 19  # characters; equal in both tables, so that their columns align
TESTED_FORMATS = ("raw", "affine8", "affine4", "affine3", "fp8", "turbo4", "turbo3")
HEADS, TOKENS, DIM = 2, 300, 64  # of the test cache
MAX_DIFFERENCE = 1e-3  # allowed between backends; rounding of float32 sums causes far less


def doctor(
    kernels: Annotated[
        bool, Option("--kernels", help="Fail if no compiled kernel runs on the processor.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Report what runs on this machine, and test the kernels."""
    begin = time.perf_counter()
    system = _describe_system()
    if not json:
        _show_system(system)
    facts = system | _run_self_test()
    facts["seconds"] = time.perf_counter() - begin
    facts["healthy"] = not _list_failures(facts)
    if json:
        print_json(facts)
    else:
        _show_self_test(facts)
    if not facts["healthy"] or (kernels and not facts["compiled"]):
        raise SystemExit(1)


def _describe_system() -> dict[str, Any]:
    """Return the facts that need no import of torch, which takes a second."""
    return {
        "kvant": version("kvant"),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": describe_processor(),
        "cores": os.cpu_count(),
        "memory": _read_memory_nbytes(),
        "extras": _list_missing_packages(),
    }


def _run_self_test() -> dict[str, Any]:
    """Test backends and kernels, and return the results with the facts that need torch."""
    import torch

    from kvant.attention.dispatch import BACKENDS
    from kvant.bench.harness import describe_machine
    from kvant.native import get_library

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    views = {device: _make_view("affine4", device) for device in devices}
    return describe_machine() | {
        "kernels": get_library().isa or get_library().reason,
        "compiled": get_library().functions is not None,
        "slow_dtypes": list_slow_dtypes(),
        "gpu": _describe_gpu(),
        "backends": {  # null if a backend supports affine4 rows on a device, else the reason
            device: {backend.name: backend.supports(view, None) for backend in BACKENDS}
            for device, view in views.items()
        },
        "self_test": [row for device in devices for row in _compare_backends(device)],
    }


def _make_view(spec: str, device: str) -> View:
    import torch

    from kvant.cache import Cache

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 1, HEADS, TOKENS, DIM, generator=generator).to(device)
    view: View = Cache(1, spec)[0].append(*rows)
    return view


def _compare_backends(device: str) -> Iterator[dict[str, Any]]:
    """Yield the largest difference of each compiled backend from the reference, by format."""
    import torch

    from kvant.attention import attend
    from kvant.attention.dispatch import BACKENDS

    queries = torch.randn(1, 2 * HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    queries = queries.to(device)
    for spec in TESTED_FORMATS:
        view = _make_view(spec, device)
        expected = attend(queries, view, backend="reference")
        for backend in BACKENDS[:2]:  # native and triton; the reference is the third
            if backend.supports(view, None) is None:
                output = attend(queries, view, backend=backend.name)
                difference = (output - expected).abs().max().item()
                row = {"format": spec, "device": device, "backend": backend.name}
                yield row | {"difference": difference}


def _describe_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return f"none found by torch {torch.__version__}"
    gpus = (torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count()))
    return ", ".join(f"{gpu.name}, {format_size(gpu.total_memory)}" for gpu in gpus)


def _read_memory_nbytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on this operating system
        return None


def _list_missing_packages() -> dict[str, list[str]]:
    """Return for each extra the packages it needs that are not installed."""
    requirements = [Requirement(text) for text in requires("kvant") or ()]
    return {
        extra: [
            str(requirement.name)
            for requirement in _list_requirements(requirements, extra)
            if not _is_installed(requirement)
        ]
        for extra in EXTRAS
    }


def _list_requirements(requirements: list[Requirement], extra: str) -> Iterator[Requirement]:
    """Yield the requirements that an extra adds, also through other extras of kvant."""
    for requirement in requirements:
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.marker.evaluate({"extra": ""}):  # required without the extra, too
            continue
        if requirement.name == "kvant":
            for other_extra in requirement.extras:
                yield from _list_requirements(requirements, other_extra)
        else:
            yield requirement


def _is_installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _make_label_table() -> tuple[Console, Table]:
    console, table = make_table()
    table.show_header = False
    table.add_column(no_wrap=True, min_width=LABEL_WIDTH)
    return console, table


def _show_system(facts: dict[str, Any]) -> None:
    console, table = _make_label_table()
    memory = "" if facts["memory"] is None else f", {format_size(facts['memory'])} of memory"
    table.add_row(
        "versions",
        f"kvant {facts['kvant']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"Python {facts['python']}, {facts['system']}",
    )
    table.add_row("processor", f"{facts['processor']}, {facts['cores']} cores{memory}")
    for extra, missing in facts["extras"].items():
        advice = f"missing {', '.join(missing)}: pip install 'kvant[{extra}]'"
        table.add_row(f"kvant[{extra}]", advice if missing else "installed")
    console.print(table)


def _list_failures(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the self-test that differ too much; NaN does."""
    return [row for row in facts["self_test"] if not row["difference"] < MAX_DIFFERENCE]


def _show_self_test(facts: dict[str, Any]) -> None:
    console, table = _make_label_table()
    table.add_row("threads", f"torch uses {facts['threads']}")
    table.add_row("GPU", facts["gpu"])
    table.add_row("kernels", facts["kernels"])
    slow = " and ".join(facts["slow_dtypes"])
    advice = f"torch multiplies {slow} slowly here: pack the weights, or use --dtype float32"
    table.add_row("dtypes", advice if slow else "none is slow")
    for device, backends in facts["backends"].items():
        default = next(name for name, reason in backends.items() if reason is None)
        for name, reason in backends.items():
            status = "the default" if name == default else "available with --backend"
            table.add_row(f"{name} on {device}", f"unavailable: {reason}" if reason else status)
    console.print(table)
    failures = _list_failures(facts)
    for row in failures:
        console.print(
            f"WRONG: {row['backend']} on {row['device']} differs from the reference by "
            f"{row['difference']:.2g} with {row['format']} rows",
            soft_wrap=True,
        )
    if not failures:
        worst = max((row["difference"] for row in facts["self_test"]), default=None)
        result = f"{len(facts['self_test'])} kernels agree with the reference to {worst or 0:.1g}"
        if worst is None:
            result = "no kernel to compare, the reference backend is used"
        console.print(f"self-test: {result}, in {facts['seconds']:.1f} s", soft_wrap=True)
