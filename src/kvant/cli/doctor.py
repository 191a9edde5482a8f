"""`kvant doctor`: list the kernels, devices and extras of this machine, and test the kernels."""

from __future__ import annotations

import json as json_text
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from typer import Option

from kvant.cli import options
from kvant.platform.devices import describe_processor, list_slow_dtypes
from kvant.platform.sizes import format_size
from kvant.platform.tables import make_table

EXTRAS = ("server", "ray", "redis", "object", "grammar", "plot", "gpu")
LABEL_WIDTH = 19  # characters; the same in both tables, so that they look like one
MAX_DIFFERENCE = 1e-3  # between backends; the order of float32 sums changes far less


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
    facts["healthy"] = all(row["difference"] < MAX_DIFFERENCE for row in facts["self_test"])
    if json:
        print(json_text.dumps(facts))
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
        "extras": dict(_list_missing_extras()),
    }


def _run_self_test() -> dict[str, Any]:
    """Test backends and kernels, and return the results with the facts that need torch."""
    from kvant.bench.report import describe_machine
    from kvant.cli import self_test
    from kvant.native import get_library

    devices = self_test.list_devices()
    return describe_machine() | {
        "kernels": get_library().isa or get_library().reason,
        "compiled": get_library().functions is not None,
        "packed_weights": self_test.describe_packing(),
        "slow_dtypes": list_slow_dtypes(),
        "gpu": self_test.describe_gpu(),
        "backends": {device: self_test.explain_backends(device) for device in devices},
        "self_test": [row for device in devices for row in self_test.compare_backends(device)],
    }


def _read_memory_nbytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on this operating system
        return None


def _list_missing_extras() -> Iterator[tuple[str, list[str]]]:
    """Yield each extra with the packages it needs that are not installed."""
    try:
        requirements = [Requirement(text) for text in requires("kvant") or ()]
    except PackageNotFoundError:  # run from a source folder, not installed
        return
    for extra in EXTRAS:
        missing = [
            str(requirement.name)
            for requirement in _list_requirements(requirements, extra)
            if not _is_installed(requirement)
        ]
        yield extra, missing


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


def _show_self_test(facts: dict[str, Any]) -> None:
    console, table = _make_label_table()
    table.add_row("threads", f"torch uses {facts['threads']}")
    table.add_row("GPU", facts["gpu"])
    table.add_row("kernels", facts["kernels"])
    table.add_row("packed weights", facts["packed_weights"])
    slow = " and ".join(facts["slow_dtypes"])
    advice = f"{slow} prefill is slower than float32 here: use --dtype float32"
    table.add_row("dtypes", advice if slow else "none is slow")
    for device, backends in facts["backends"].items():
        default = next(name for name, reason in backends.items() if reason is None)
        for name, reason in backends.items():
            status = "the default" if name == default else "available with --backend"
            table.add_row(f"{name} on {device}", f"unavailable: {reason}" if reason else status)
    console.print(table)
    failures = [row for row in facts["self_test"] if row["difference"] >= MAX_DIFFERENCE]
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
