"""Test the import rule of docs/architecture.md: a module imports from its own rank or below."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent / "src" / "kvant"

# Lowest first. A name with a slash is a folder, the others are single modules. The modules of a
# rank may be imported by each other and by its folders, a folder only from above.
RANKS = (
    "contracts errors lazy page_table recipes retention platform/",
    "native/",
    "codecs/",
    "attention/ spec/ functional",
    "pages/ weights/",
    "cache/ models/ demo/ stores/ adapters/",
    "hf/ gguf/",
    "vision/ replay/",
    "checkpoints/",
    "planner types",
    "probing/ prefixes/",
    "generation/",
    "engine/",
    "server/",
    "serve/",
    "bench/ eval/ lm_eval/",
    "cli/",
)
PLACES = {name: rank for rank, names in enumerate(RANKS) for name in names.split()}
RANK = {name.rstrip("/"): rank for name, rank in PLACES.items()}
FOLDERS = {name.rstrip("/") for name in PLACES if name.endswith("/")}
KNOWN = [[], *([name] for name in RANK)]  # possible continuations of "kvant."
HOST = RANK["hf"]  # from here up transformers may be imported
COMMANDS = [
    "run",
    "chat",
    "batch",
    "serve",
    "formats",
    "plan",
    "recommend",
    "eval",
    "inspect",
    "doctor",
    "store",
    "bench",
]
# Triton's own language: all of it is optional.
KERNELS = ("kvant.attention.triton.kernels", "kvant.codecs.frames.rotation_kernel")


class Import(NamedTuple):
    target: str  # dotted and absolute; `from a import b` is a.b
    line: int
    nested: bool  # inside a function: runs only when called


class Collector(ast.NodeVisitor):
    def __init__(self, package: str) -> None:
        self.package = package
        self.depth = 0
        self.found: list[Import] = []

    def add(self, target: str, node: ast.stmt) -> None:
        self.found.append(Import(target, node.lineno, self.depth > 0))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = self.package.split(".")[: 1 - node.level or None] if node.level else []
        base = ".".join([*parts, *([node.module] if node.module else [])])
        for alias in node.names:
            self.add(f"{base}.{alias.name}", node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def is_in_package(module: str, *packages: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def find_fault(module: str, import_: Import) -> str | None:
    """Return why this import in `module` ("kvant.codecs.affine") is wrong, or None."""
    root, *path = import_.target.split(".")
    own_parts = module.split(".")[1:]
    rank = RANK[own_parts[0]] if own_parts else None  # None: kvant/__init__.py, above all
    kernels = root == "triton" or is_in_package(import_.target, *KERNELS)
    if kernels and not import_.nested and not is_in_package(module, *KERNELS):
        return "triton is optional: import it inside the function that needs it"
    if root == "transformers" and (rank is None or rank < HOST):
        return "only hf and what stands above it may import transformers"
    if root != "kvant" or rank is None:
        return None
    if not path or path[0] not in RANK:
        return "not a module of RANKS: import from the module that defines the name"
    for depth, part in enumerate(path):
        if is_private(part) and path[:depth] != own_parts[:depth]:
            return f"{part} is private to kvant.{'.'.join(path[:depth])}"
    if path[0] == own_parts[0] or RANK[path[0]] < rank:
        return None
    if RANK[path[0]] > rank:
        return f"{path[0]} stands above {own_parts[0]}"
    if path[0] in FOLDERS:
        return f"{path[0]} is a folder of the same rank"
    return None


def list_faults(module: str, source: str, is_package: bool = False) -> list[str]:
    collector = Collector(module if is_package else module.rpartition(".")[0])
    collector.visit(ast.parse(source))
    pairs = [(import_, find_fault(module, import_)) for import_ in collector.found]
    return [
        f"{module}:{import_.line}: {import_.target}: {reason}"
        for import_, reason in pairs
        if reason
    ]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_module_has_a_rank() -> None:
    unknown = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        name = f"{parts[0]}/" if len(parts) > 1 else path.stem
        if name not in ("__init__", *PLACES):
            unknown.append(name)
    assert not unknown, (
        f"no rank for {sorted(set(unknown))}: add it to RANKS of {Path(__file__).name}"
    )


def test_imports_go_downward() -> None:
    problems = [
        line
        for path in sorted(ROOT.rglob("*.py"))
        if (name := module_name(path)).split(".")[1:2] in KNOWN
        for line in list_faults(name, path.read_text(encoding="utf-8"), path.stem == "__init__")
    ]
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("kvant.codecs.affine", "from kvant.attention import mask", "above"),
        ("kvant.codecs.affine", "def f():\n  import kvant.cache", "above"),
        ("kvant.codecs.affine", "from ..cache import Cache", "above"),
        ("kvant.codecs.affine", "from .. import cache", "above"),
        ("kvant.attention.mask", "from kvant.codecs._bits import pack", "private"),
        ("kvant.attention.mask", "from kvant.codecs import _bits", "private"),
        ("kvant.attention.mask", "from .native import _loader", "private"),
        ("kvant.attention.mask", "from kvant.spec import parse", "same rank"),
        ("kvant.platform.torch_runtime", "from kvant.native import get_library", "stands above"),
        ("kvant.cache", "import transformers.cache_utils", "hf"),
        ("kvant", "from transformers import Cache", "hf"),
        ("kvant.attention.triton.kernel_launch", "import triton.language as tl", "optional"),
        ("kvant.attention", "from kvant.attention.triton.kernels import attend", "optional"),
        (
            "kvant.codecs.frames.hadamard",
            "from kvant.codecs.frames.rotation_kernel import rotate",
            "optional",
        ),
        ("kvant.cache.layers", "from kvant import Cache", "defines the name"),
        ("kvant.cache.layers", "import kvant", "defines the name"),
    ],
)
def test_rule_refuses_upward_imports(module: str, source: str, message: str) -> None:
    problems = list_faults(module, source)
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvant.codecs.affine", "from kvant.codecs import _bits\nfrom ._bits import pack"),
        ("kvant.codecs.affine", "from kvant import errors\nfrom ..contracts import Field"),
        ("kvant.platform.sizes", "from kvant.errors import SpecError"),
        ("kvant.native", "from kvant.platform.torch_runtime import is_transforming"),
        ("kvant.cache", "from kvant.spec import parse\nfrom kvant.attention import mask"),
        ("kvant.attention.triton.kernel_launch", "def f():\n  import triton"),
        ("kvant.attention.triton.kernel_launch", "def f():\n  from .kernels import attend"),
        ("kvant.attention.triton.kernels.attend", "import triton\nfrom . import records"),
        ("kvant.attention.native", "from kvant.attention.mask import evaluate_mask"),
        ("kvant.hf.cache", "from transformers import Cache\nfrom kvant.cache import Cache as Own"),
        ("kvant.cli.run", "def f():\n  import transformers"),
        ("kvant", "from .cli import main\nfrom kvant.cache import Cache"),
    ],
)
def test_rule_allows_downward_imports(module: str, source: str) -> None:
    assert (
        list_faults(module, source, is_package=module in ("kvant", "kvant.attention.native")) == []
    )


SLOW = ("numpy", "torch", "transformers", "triton")


def list_imports(code: str) -> list[str]:
    """Run `code` in a separate process, and list the slow packages that it imported."""
    program = f"{code}\nimport sys; print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    modules = ran.stdout.split("\n")[-2].split()
    return [name for name in SLOW if name in modules]


@pytest.mark.parametrize(
    "code",
    [
        "import kvant",
        "from kvant.errors import SpecError",
        "import kvant; kvant.CacheError, kvant.CacheSpec, dir(kvant)",
        "from kvant.spec import parse_words; parse_words('bf16,page=64,prune=snapkv:25%,edge=2')",
        "from kvant.spec import language; language.check_spec_or_auto('auto:1GiB,max_kl=0.01')",
    ],
)
def test_spec_parsing_needs_no_torch(code: str) -> None:
    assert list_imports(code) == []


@pytest.mark.parametrize("optional", ["transformers", "triton"])
def test_cache_needs_no_optional_package(optional: str) -> None:
    assert optional not in list_imports("import kvant; kvant.Cache(1, 'affine4')")


COMMANDS_IN_ONE_PROCESS = """
import sys
from kvant_command import main
for words in {commands}:
    sys.argv = ["kvant", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    if loaded := [name for name in {slow} if name in sys.modules]:
        sys.exit(f"kvant {{words}}: {{loaded}}")
"""


def assert_no_imports(*commands: str) -> None:
    """Assert that no command, one after the other in a process, imports a slow package."""
    code = COMMANDS_IN_ONE_PROCESS.format(commands=commands, slow=SLOW)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-1000:]


def test_help_needs_no_torch() -> None:
    assert_no_imports(
        "--help",
        *(f"{name} --help" for name in COMMANDS),
        "store prune --help",
        "formats",
        "--show-completion bash",
    )


@pytest.mark.parametrize("words", ["kvant ru", "kvant run --kv-", "kvant bench att"])
def test_completion_needs_no_torch(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KVANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert_no_imports("")


def test_user_errors_need_no_torch() -> None:
    assert_no_imports(
        "run --nonsense",
        "run --prompt x --kv-cache affine9",
        "run --prompt x --temperature -1",
        "run --prompt x --top-p 2",
        "run --prompt x --strategy none",
        "run --prompt x --model ./nowhere",
        "run --prompt x --dtype int8",
        "run --file nowhere",
        "run --prompt x --device foo",
        "run --prompt x --backend foo",
        "run --load nowhere",
        "chat --load nowhere",
        "batch pyproject.toml --out there.jsonl --device foo",
        "serve --max-bytes bad",
        "serve --api-keys nowhere",
        "serve --store foo://x",
        "serve --device foo",
        "serve --backend foo",
        "inspect nowhere",
        "chat --kv-cache affine8,window=4k",
        "batch nowhere.jsonl --out there.jsonl",
        "serve --kv-cache affine9",
        "serve --model ./nowhere",
        "eval --formats affine9",
        "plan --kv-cache affine9",
        "formats affine9",
        "store ls nowhere",
    )
