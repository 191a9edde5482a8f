"""Check kvant on a GPU in ten minutes: right results first, then the speeds that it must reach.

Each step prints its table and its gates, and rewrites the JSON file, so an interrupted run leaves
results. The parts of a step run in another process, one at a time: a part that crashes or hangs
costs only itself. A part that cannot start in time is listed as not run.

`--rehearse` runs the same steps on the CPU, in Triton's interpreter and with tiny sizes: its times
mean nothing. The exit code is 1 unless every gate is passed; in a rehearsal, unless every part runs
and every format is right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, NamedTuple

import torch
import typer

from kvant.bench import harness
from kvant.bench.attend import AttendTask, measure_attention
from kvant.bench.batch import measure_batches
from kvant.bench.cache_race import RaceTask, open_model, run_race
from kvant.bench.harness import CPU, DEVICES, BenchDevice
from kvant.bench.kernel_check import FORMATS, RIGHT, check_format, is_supported
from kvant.bench.worker import Outcome, Worker
from kvant.platform.torch_runtime import is_triton_installed

Rows = list[dict[str, Any]]
Measured = tuple[Rows, list[str]]  # rows of a table, and a line for each method that does not run
INTERPRET = "TRITON_INTERPRET"  # read by Triton when it is imported
# A rehearsal hides GPUs, and uses one thread: more would wait for each other on tiny tensors.
REHEARSAL_ENVIRONMENT = {INTERPRET: "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
MIN_SPEEDUPS = {"affine8": 1.5, "affine4": 2.0, "turbo4v4": 2.0}  # over raw
MIN_COPY_SHARE = 0.8
BATCH_FORMATS = "raw", "affine8"
# Seconds without which a part does not start: most of them are for compilers.
FORMAT_SECONDS, ATTENTION_SECONDS, TOKEN_SECONDS, BATCH_SECONDS = 10, 30, 90, 45


@dataclass(frozen=True)
class Sizes:
    """Where to measure, and how much."""

    device: BenchDevice
    backend: str  # that must read the pages
    check_shape: tuple[int, int, int, int]  # key heads, query group, rows, channels
    rows: int  # per sequence of the attention
    attention: tuple[AttendTask, ...]
    baseline: str
    shape: str
    context: int  # of one token
    sequences: int
    batch_context: int
    repeats: int  # tokens


FULL = Sizes(
    device=DEVICES["cuda"],
    backend="triton",
    check_shape=(8, 4, 1000, 128),
    rows=32768,
    attention=tuple(
        AttendTask(batch, heads=8, group=4, dim=128, queries=1, repeats=50, backend="triton")
        for batch in (8, 1)
    ),
    baseline=harness.STATIC,
    shape="0.6b",
    context=8192,
    sequences=16,
    batch_context=2048,
    repeats=50,
)
REHEARSAL = Sizes(
    device=CPU,
    backend="interpreted",
    check_shape=(1, 2, 72, 32),
    rows=72,
    attention=tuple(
        AttendTask(batch, heads=1, group=2, dim=32, queries=1, repeats=1, backend="interpreted")
        for batch in (2, 1)
    ),
    baseline=harness.DYNAMIC,
    shape="tiny",
    context=72,
    sequences=4,
    batch_context=72,
    repeats=2,
)


class Part(NamedTuple):
    """What runs without a pause, and adds rows to its step's table."""

    name: str
    seconds: int  # needed before it starts
    call: Callable[[], Measured]


@dataclass
class CheckStep:
    """Parts whose rows make one table, and the gates that the table decides."""

    title: str
    parts: list[Part]
    judge: Callable[[Rows], Rows]
    rows: Rows = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # parts that failed or did not run
    skipped: list[str] = field(default_factory=list)  # methods that do not run here
    seconds: float = 0.0

    @property
    def gates(self) -> Rows:
        return self.judge(self.rows)

    def summarize(self) -> dict[str, Any]:
        done = f"{len(self.parts) - len(self.failures)} of {len(self.parts)}"
        return {"step": self.title, "parts_done": done, "seconds": self.seconds}


def make_gate(name: str, floor: float, measured: float | None) -> dict[str, Any]:
    """Return the row of a gate; without a measured value it is open."""
    verdict = "open" if measured is None else "passed" if measured >= floor else "missed"
    return {"gate": name, "floor": floor, "measured": measured, "verdict": verdict}


def find_figure(rows: Rows, name: str, **figures: Any) -> float | None:
    """Return a figure of the first row that has the other figures; None without such a row."""
    return next((row[name] for row in rows if figures.items() <= row.items()), None)


def plan_formats(sizes: Sizes) -> CheckStep:
    """Plan the comparison of every format with the reference."""

    def judge(rows: Rows) -> Rows:
        num_right = sum(row["verdict"] == RIGHT for row in rows) if rows else None
        return [make_gate("formats that are right", sum(map(is_supported, FORMATS)), num_right)]

    calls = {name: partial(measure_format, name, sizes) for name in FORMATS}
    parts = [Part(name, FORMAT_SECONDS, call) for name, call in calls.items()]
    return CheckStep("formats", parts, judge)


def measure_format(name: str, sizes: Sizes) -> Measured:
    return [check_format(name, sizes.backend, sizes.device, sizes.check_shape)], []


def plan_attention(task: AttendTask, sizes: Sizes) -> CheckStep:
    """Plan attention of one token: each format takes turns with raw, torch and a copy."""
    title = f"attention, {task.batch} x {sizes.rows}"

    def judge(rows: Rows) -> Rows:
        raw = find_figure(rows, "median_ms", way="raw")
        flash = find_figure(rows, "median_ms", way="torch flash")
        figures = {
            "raw / copy": (MIN_COPY_SHARE, find_figure(rows, "share", way="raw")),
            "raw / torch flash": (1.0, flash / raw if raw and flash else None),
        }
        for name, floor in MIN_SPEEDUPS.items():
            figures[f"{name} / raw"] = floor, find_figure(rows, "against_raw", way=name)
        return [make_gate(f"{name}, {title}", *values) for name, values in figures.items()]

    calls = {
        name: partial(measure_attention, sizes.rows, [name], task, sizes.device)
        for name in MIN_SPEEDUPS
    }
    parts = [Part(name, ATTENTION_SECONDS, call) for name, call in calls.items()]
    return CheckStep(title, parts, judge)


def plan_token(sizes: Sizes) -> CheckStep:
    """Plan tokens of one sequence, which kvant must replay from a graph."""
    title = f"one token, {sizes.shape} at {sizes.context}"

    def judge(rows: Rows) -> Rows:
        replayed, ratio = (find_figure(rows, name, cache="raw") for name in ("replayed", "ratio"))
        return [
            make_gate(f"replayed tokens, {title}", sizes.repeats, replayed),
            make_gate(f"raw / {sizes.baseline}, {title}", 1.0, ratio),
        ]

    return CheckStep(title, [Part("raw", TOKEN_SECONDS, partial(measure_token, sizes))], judge)


def measure_token(sizes: Sizes) -> Measured:
    task = RaceTask(
        shape=sizes.shape,
        repeats=sizes.repeats,
        formats="raw",
        device=sizes.device,
        baseline=sizes.baseline,
        peaks=False,
    )
    return run_race([sizes.context], task), []


def plan_sequences(sizes: Sizes) -> CheckStep:
    """Plan tokens of several sequences at once."""
    title = f"{sizes.sequences} sequences, {sizes.shape} at {sizes.batch_context}"

    def judge(rows: Rows) -> Rows:
        ratio = find_figure(rows, "ratio", cache="raw", sequences=sizes.sequences)
        return [make_gate(f"raw / dynamic, {title}", 1.0, ratio)]

    calls = {name: partial(measure_sequences, name, sizes) for name in BATCH_FORMATS}
    parts = [Part(name, BATCH_SECONDS, call) for name, call in calls.items()]
    return CheckStep(title, parts, judge)


def measure_sequences(name: str, sizes: Sizes) -> Measured:
    model, _ = open_model(sizes.shape, None, None, sizes.device)
    counts = 1, sizes.sequences
    repeats, device = sizes.repeats, sizes.device
    return measure_batches(model, name, sizes.batch_context, counts, repeats, device), []


def run_step(step: CheckStep, worker: Worker, deadline: float) -> None:
    """Run the parts that can start before the deadline; stop one that still runs then."""
    begin = monotonic()
    for part in step.parts:
        harness.show_progress(f"{step.title}: {part.name}")
        left = deadline - monotonic()
        if left >= part.seconds:
            outcome = worker.run(part.call, left)
        else:
            outcome = Outcome(error=f"not run: {left:.0f} s left, {part.seconds} needed")
        if outcome.error is not None:
            step.failures.append(f"{step.title}, {part.name}: {outcome.error}")
            continue
        rows, skipped = outcome.value
        step.rows += rows
        step.skipped += [f"{step.title}, {line}" for line in skipped]
    step.seconds = monotonic() - begin


@dataclass(frozen=True)
class Report:
    """The results so far."""

    steps: Sequence[CheckStep]
    sizes: Sizes
    minutes: float
    gpu: Mapping[str, Any]

    @property
    def gates(self) -> Rows:
        return [gate for step in self.steps for gate in step.gates]

    @property
    def summaries(self) -> Rows:
        return [step.summarize() for step in self.steps]

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "rehearsal": self.sizes is REHEARSAL,
            "minutes": self.minutes,
            "attention": [asdict(task) for task in self.sizes.attention],
            "skipped": [line for step in self.steps for line in (*step.failures, *step.skipped)],
            "rows": self.gates,
            "tables": {"steps": self.summaries, **{s.title: s.rows for s in self.steps if s.rows}},
        }

    def write(self, file: Path) -> None:
        file.write_text(harness.format_report("gpu", self.facts, self.gpu) + "\n", "utf-8")

    @property
    def is_passed(self) -> bool:
        """Whether all gates are passed; in a rehearsal, whether all parts ran and are right."""
        if self.sizes is not REHEARSAL:
            return all(gate["verdict"] == "passed" for gate in self.gates)
        failures = [line for step in self.steps for line in step.failures]
        return not failures and self.gates[0]["verdict"] == "passed"


def choose_sizes(rehearse: bool) -> Sizes:
    """Return what to measure; raise ValueError if this machine cannot."""
    if not is_triton_installed():
        raise ValueError("triton is not installed: pip install 'kvant[gpu]'")
    if rehearse:
        return REHEARSAL
    if not torch.cuda.is_available():
        raise ValueError(
            f"torch {torch.__version__} finds no GPU here: install a torch for CUDA, as "
            "docs/benchmarks/gpu.md says, or give --rehearse"
        )
    if os.environ.get(INTERPRET):
        raise ValueError(f"{INTERPRET} is set: unset it, so that the kernels run on the GPU")
    return FULL


def main(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="A part that cannot start in this time is not run")
    ] = 10,
    output: Annotated[Path, typer.Option(help="JSON file, rewritten after each step")] = Path(
        "gpu.json"
    ),
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Tiny sizes on the CPU, in Triton's interpreter")
    ] = False,
    json: harness.Json = False,
) -> None:
    """Check the kernels on a GPU, and the speeds that they must reach."""
    deadline = monotonic() + minutes * 60
    sizes = choose_sizes(rehearse)
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output {output}: the name of a file in an existing folder is needed")
    attention = [plan_attention(task, sizes) for task in sizes.attention]
    steps = [plan_formats(sizes), *attention, plan_token(sizes), plan_sequences(sizes)]
    report = Report(steps, sizes, minutes, sizes.device.describe())
    with Worker(REHEARSAL_ENVIRONMENT if rehearse else {}) as worker:
        for step in steps:
            run_step(step, worker, deadline)
            report.write(output)
            harness.print_skipped([*step.failures, *step.skipped])
            if not json:
                show_step(step)
    if not json:
        harness.print_table("steps", report.summaries)
        note = " of a rehearsal: times mean nothing" if rehearse else ""
        harness.print_table(f"all gates{note}", report.gates)
    harness.print_json("gpu", report.facts, quiet=json, gpu=report.gpu)
    if not report.is_passed:
        raise typer.Exit(1)


def show_step(step: CheckStep) -> None:
    """Print the table and the gates of a step."""
    if step.rows:
        harness.print_table(step.title, step.rows)
    harness.print_table("gates", step.gates)


if __name__ == "__main__":
    harness.run(main)
