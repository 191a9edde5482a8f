"""Print the sizes of files in src/kvant; fail if a file or a function is too long."""

import ast
import sys
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


def list_functions(tree: ast.AST, prefix: str) -> list[CodeSize]:
    """List the functions in `tree`, methods and inner functions included."""
    functions: list[CodeSize] = []
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            functions += list_functions(node, prefix)
            continue
        name = prefix + node.name
        if not isinstance(node, ast.ClassDef):
            assert node.end_lineno is not None
            functions.append(CodeSize(name, node.end_lineno - node.lineno + 1))
        functions += list_functions(node, name + ".")
    return functions


def compute_p90(lines: list[int]) -> int:
    return round(quantiles(lines, n=10, method="inclusive")[-1]) if len(lines) > 1 else lines[0]


def format_summary(title: str, sizes: list[CodeSize], limit: int) -> str:
    lines = [size.lines for size in sizes]
    columns = f"{len(lines):>6}{median(lines):>9.0f}{compute_p90(lines):>6}{max(lines):>6}"
    return f"{title:10}{columns}{limit:>8}"


def main() -> int:
    files: list[CodeSize] = []
    all_functions: list[CodeSize] = []
    print(f"{'lines':>6}{'longest function':>18}  file")
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        functions = list_functions(ast.parse(source, name), f"{name}:")
        files.append(CodeSize(name, len(source.splitlines())))
        all_functions += functions
        print(f"{files[-1].lines:>6}{max((f.lines for f in functions), default=0):>18}  {name}")
    if not files:
        print(f"no files in {ROOT}", file=sys.stderr)
        return 1

    print(f"\n{'':10}{'count':>6}{'median':>9}{'p90':>6}{'max':>6}{'limit':>8}")
    print(format_summary("files", files, MAX_FILE))
    if all_functions:
        print(format_summary("functions", all_functions, MAX_FUNCTION))

    limits = [(size, MAX_FILE) for size in files] + [(size, MAX_FUNCTION) for size in all_functions]
    long = {size.name: (size.lines, limit) for size, limit in limits if size.lines > limit}
    errors = [f"{n}: {long[n][0]} lines, at most {long[n][1]}" for n in long if n not in ALLOWED]
    errors += [f"{name}: allowed to be longer, but is not" for name in ALLOWED if name not in long]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
