"""`kvant doctor`: what runs here, why the rest does not, and a test of it that takes a second."""

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
from kvant.devices import describe_processor, list_slow_dtypes
from kvant.sizes import format_size
from kvant.tables import make_table

EXTRAS = ("server", "ray", "redis", "object", "grammar", "plot", "gpu")
LABEL = 19  # characters: two tables below each other look like one
MAX_DIFFERENCE = 1e-3  # between backends: float32 in another order is closer by far


def doctor(
    kernels: Annotated[
        bool, Option("--kernels", help="Fail where no kernel runs on the processor.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Say what runs on this machine, and test the kernels."""
    begin = time.perf_counter()
    system = _system()
    if not json:
        _show_system(system)
    facts = system | _run_self_test()
    facts["seconds"] = time.perf_counter() - begin
    facts["healthy"] = all(row["difference"] < MAX_DIFFERENCE for row in facts["self_test"])
    if json:
        print(json_text.dumps(facts))
    else:
        _show_tested(facts)
    if not facts["healthy"] or (kernels and not facts["compiled"]):
        raise SystemExit(1)


def _system() -> dict[str, Any]:
    """What is known without torch, which takes a second to import."""
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
    """What torch and the kernels do here."""
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
    except (AttributeError, OSError, ValueError):  # not of this system
        return None


def _list_missing_extras() -> Iterator[tuple[str, list[str]]]:
    """What each extra lacks."""
    try:
        every = [Requirement(text) for text in requires("kvant") or ()]
    except PackageNotFoundError:  # run from a folder
        return
    for extra in EXTRAS:
        yield (
            extra,
            [str(one.name) for one in _list_requirements(every, extra) if not _is_installed(one)],
        )


def _list_requirements(requirements: list[Requirement], extra: str) -> Iterator[Requirement]:
    for one in requirements:
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        if one.marker.evaluate({"extra": ""}):  # wanted anyway
            continue
        if one.name == "kvant":
            for other in one.extras:
                yield from _list_requirements(requirements, other)
        else:
            yield one


def _is_installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def _rows() -> tuple[Console, Table]:
    console, table = make_table()
    table.show_header = False
    table.add_column(no_wrap=True, min_width=LABEL)
    return console, table


def _show_system(facts: dict[str, Any]) -> None:
    console, table = _rows()
    memory = "" if facts["memory"] is None else f", {format_size(facts['memory'])} of memory"
    table.add_row(
        "versions",
        f"kvant {facts['kvant']}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"Python {facts['python']}, {facts['system']}",
    )
    table.add_row("processor", f"{facts['processor']}, {facts['cores']} cores{memory}")
    for extra, missing in facts["extras"].items():
        lacking = f"without {', '.join(missing)}: pip install 'kvant[{extra}]'"
        table.add_row(f"kvant[{extra}]", lacking if missing else "installed")
    console.print(table)


def _show_tested(facts: dict[str, Any]) -> None:
    console, table = _rows()
    table.add_row("threads", f"torch computes with {facts['threads']}")
    table.add_row("GPU", facts["gpu"])
    table.add_row("kernels", facts["kernels"])
    table.add_row("packed weights", facts["packed_weights"])
    slow = " and ".join(facts["slow_dtypes"])
    reads = f"{slow} read prompts slower than float32: --dtype float32" if slow else "none is slow"
    table.add_row("dtypes", reads)
    for device, backends in facts["backends"].items():
        first = next(name for name, reason in backends.items() if reason is None)
        for name, reason in backends.items():
            used = "reads rows, and is what is taken" if name == first else "reads rows if asked to"
            table.add_row(f"{name} on {device}", f"does not: {reason}" if reason else used)
    console.print(table)
    far = [row for row in facts["self_test"] if row["difference"] >= MAX_DIFFERENCE]
    for row in far:
        console.print(
            f"WRONG: {row['backend']} on {row['device']} is {row['difference']:.2g} from the "
            f"reference with {row['format']} rows",
            soft_wrap=True,
        )
    if not far:
        most = max((row["difference"] for row in facts["self_test"]), default=None)
        agree = f"{len(facts['self_test'])} kernels agree with the reference, to {most or 0:.1g}"
        none = "there is no kernel to compare, the reference computes"
        result = none if most is None else agree
        console.print(f"self-test: {result}, in {facts['seconds']:.1f} s", soft_wrap=True)
