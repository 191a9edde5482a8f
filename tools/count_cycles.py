"""Count the cycles of decode attention on 64-bit Arm, without such a processor.

`python tools/count_cycles.py` compiles the kernels of one token (128 channels, four queries per key
head) for each instruction set of NEON, and runs llvm-mca on their innermost loops. It prints cycles
per row and key head for scores and values, beside the cycles in which memory delivers the bytes.
Softmax, weights and scales are not counted. It needs aarch64-linux-gnu-g++ and llvm-mca.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvant.bench.harness import print_table

SOURCES = Path(__file__).resolve().parent.parent / "src" / "native"
ISAS = {
    "neon": (),
    "neon+dotprod": ("-march=armv8.2-a+dotprod", "-DKVANT_BYTE_DOT=1"),
    "neon+dotprod+i8mm": (
        *("-march=armv8.2-a+dotprod+i8mm", "-DKVANT_BYTE_DOT=1", "-DKVANT_BYTE_MATRIX=1"),
    ),
}
FLAGS = ("-std=c++17", "-O3", "-fno-code-hoisting", "-fno-schedule-insns", "-DKVANT_LEVEL=128")
DIM, QUERIES = 128, 4

CODES = """
template void quad_group<{bits}, {span}, {words}::Sums<0>, 4, 1, {words}>(
    const SealedBlock &, const uint8_t *, const {words} &, const {words}::Number *, int,
    F (&)[1][4]);
template void quad_values_part<{bits}, {span}, 4, 1, 0, {words}>(
    const SealedBlock &, const {words} &, float, int, const FixedWeights<{words}::Number> &,
    float *, int64_t);
"""
LOOPS = {"scores": "row_scores|quad_group", "values": "row_values_part|quad_values_part"}


class Format(NamedTuple):
    """The kernels of one format, and the bytes of a key and a value."""

    source: str
    nbytes: int
    coded: bool = False
    table: bool = False


FORMATS = {
    "raw": Format(
        """
template void row_scores<Bfloat, 4>(const RowBlock &, const float *, int64_t, int, float *);
template void row_values_part<Bfloat, 4, 1>(
    const RowBlock &, const float *, int, float *, int64_t);
""",
        nbytes=2 * 2 * DIM,
    ),
    "affine8": Format(
        CODES.format(bits=8, span=16, words="CodeWords<8>"), 2 * (DIM + DIM // 32 * 4), coded=True
    ),
    "affine4": Format(
        CODES.format(bits=4, span=32, words="CodeWords<4>"),
        2 * (DIM // 2 + DIM // 32 * 4),
        coded=True,
    ),
    "turbo4v4": Format(
        CODES.format(bits=4, span=32, words="TableWords<4>"),
        2 * (DIM // 2 + 2),
        coded=True,
        table=True,
    ),
    "fp8": Format(CODES.format(bits=8, span=16, words="HalfWords"), nbytes=2 * (DIM + 2)),
}

# Products of one instruction.
PRODUCTS = {"fmla": 4, "smlal": 4, "sdot": 16, "smmla": 32}


class Machine(NamedTuple):
    """The specification of a machine: memory bandwidth, cores that share it, and clock."""

    gb_s: float
    cores: int
    ghz: float

    @property
    def bytes_per_cycle(self) -> float:
        return self.gb_s / self.cores / self.ghz


MACHINES = {
    "M1": Machine(68.25, 4, 3.2),
    "Graviton2": Machine(204.8, 64, 2.5),
    "Graviton3": Machine(307.2, 64, 2.6),
}


def count_multiplies(lines: list[str]) -> int:
    """Return the multiplications of single numbers that the instructions do."""
    names = [re.sub(r"2$", "", line.split()[0]) for line in lines]
    return sum(PRODUCTS.get(name, 0) for name in names)


def find_loops(lines: list[str]) -> list[list[str]]:
    """Return the instructions of the innermost loops of a function."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    ranges = [
        (labels[target], i)
        for i, line in enumerate(lines)
        if (jump := re.match(r"(?:b\.?\w{0,2}|cbn?z|tbn?z) (?:.*, ?)?(\.L\w+)$", line))
        and labels.get(target := jump[1], i) < i
    ]
    inner = [
        (a, b)
        for a, b in ranges
        if not any((a, b) != (c, d) and a <= c and d <= b for c, d in ranges)
    ]
    return [[line for line in lines[a : b + 1] if not line.endswith(":")] for a, b in inner]


def split_functions(assembly: str) -> dict[str, list[str]]:
    """Return labels and instructions by function."""
    functions: dict[str, list[str]] = {}
    current: list[str] = []
    for raw in assembly.splitlines():
        line = re.sub(r"\s+", " ", raw.split("//")[0]).strip()
        if re.fullmatch(r"_Z\w+:", line):
            current = functions.setdefault(line[:-1], [])
        elif line and (not line.startswith(".") or re.fullmatch(r"\.L\w+:", line)):
            current.append(line)
    return functions


def compile_kernels(isa: str, source: str) -> dict[str, list[str]]:
    """Return the assembly of the kernels by function."""
    text = f'#include "scores.hpp"\nnamespace kvant::KVANT_TARGET {{{source}}}\n'
    command = ["aarch64-linux-gnu-g++", *FLAGS, *ISAS[isa], "-DKVANT_TARGET=kernels"]
    command += [f"-I{SOURCES}", "-S", "-x", "c++", "-", "-o", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return split_functions(done.stdout)


def simulate(loop: list[str], model: str) -> float:
    """Return the cycles of one iteration of a loop on a processor model of llvm-mca."""
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write("\n".join(loop) + "\n")
        file.flush()
        command = ["llvm-mca", "-mtriple=aarch64", f"-mcpu={model}", "-mattr=+dotprod,+i8mm"]
        command += ["-iterations=200", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    cycles = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert cycles is not None
    return int(cycles[1]) / 200


def count_row(function: list[str], multiplies: int, model: str) -> float:
    """Return the cycles of one row in the loop of a kernel with the fewest instructions."""
    loops = [(count_multiplies(loop), loop) for loop in find_loops(function)]
    most = max(count for count, _ in loops)
    loop = min((loop for count, loop in loops if count == most), key=len)
    return simulate(loop, model) * multiplies / most


def count_format(isa: str, name: str, model: str) -> dict[str, float]:
    """Return the cycles per row and key head, by part."""
    form = FORMATS[name]
    multiplies = DIM * QUERIES
    if form.coded and isa != "neon":  # two halves of a query, and of a level
        multiplies *= 4 if form.table and "i8mm" in isa else 3 if form.table else 2
    functions = compile_kernels(isa, form.source)
    result = {}
    for part, names in LOOPS.items():
        (function,) = (lines for symbol, lines in functions.items() if re.search(names, symbol))
        result[part] = count_row(function, multiplies, model)
    return result


def main(
    models: Annotated[
        str, typer.Option(help="Processor models of llvm-mca, comma-separated")
    ] = "apple-m1,cortex-a57",
    formats: Annotated[str, typer.Option(help="Formats, comma-separated")] = ",".join(FORMATS),
) -> None:
    """Print cycles per row and key head beside the cycles of memory."""
    for model in models.split(","):
        rows = []
        for name in formats.split(","):
            for isa in ISAS:
                if isa != "neon" and not FORMATS[name].coded:
                    continue  # the same kernels
                parts = count_format(isa, name, model)
                row = {"format": name, "kernels": isa}
                row |= {part: round(cycles) for part, cycles in parts.items()}
                row["sum"] = round(sum(parts.values()))
                for machine, spec in MACHINES.items():
                    row[machine] = round(FORMATS[name].nbytes / spec.bytes_per_cycle)
                rows.append(row)
        print_table(model, rows)


if __name__ == "__main__":
    sys.exit(typer.run(main))
