"""Summarize the sizes of files in src/kvant; fail if a file or a function is too long."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent / "src" / "kvant"
MAX_FILE = 500  # lines
MAX_FUNCTION = 80

# "cache/layer.py" or "cache/layer.py:Class.method" -> why it may be longer.
ALLOWED: dict[str, str] = {
    "cache/cache.py": "one class with all operations of a cache, a few lines each",
}


class CodeSize(NamedTuple):
    name: str
    lines: int


def list_functions(tree: ast.AST, prefix: str) -> Iterator[CodeSize]:
    """Yield the functions in `tree`, methods and inner functions included."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from list_functions(node, prefix)
            continue
        name = prefix + node.name
        if not isinstance(node, ast.ClassDef):
            assert node.end_lineno is not None
            yield CodeSize(name, node.end_lineno - node.lineno + 1)
        yield from list_functions(node, name + ".")


def main() -> int:
    files: list[CodeSize] = []
    functions: list[CodeSize] = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        files.append(CodeSize(name, len(source.splitlines())))
        functions += list_functions(ast.parse(source, name), f"{name}:")
    print(f"{'':10}{'count':>6}{'median':>9}{'p90':>6}{'max':>6}{'limit':>8}")
    long: dict[str, str] = {}
    for title, sizes, limit in (("files", files, MAX_FILE), ("functions", functions, MAX_FUNCTION)):
        lines = [size.lines for size in sizes]
        p90 = quantiles(lines, n=10, method="inclusive")[-1]
        figures = f"{len(lines):>6}{median(lines):>9.0f}{p90:>6.0f}{max(lines):>6}{limit:>8}"
        print(f"{title:10}{figures}")
        long |= {s.name: f"{s.lines} lines, at most {limit}" for s in sizes if s.lines > limit}
    errors = [f"{name}: {text}" for name, text in long.items() if name not in ALLOWED]
    errors += [f"{name}: allowed to be longer, but is not" for name in ALLOWED if name not in long]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
