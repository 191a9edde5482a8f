"""The command itself: its subcommands; how each ends is said in kvant.exit_codes.

`kvant bench NAME` is a front for `kvant.bench.NAME`, with its options and its function. A benchmark
is imported when it is asked for: most import transformers, which takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvant.cli.batch import batch
from kvant.cli.chat import chat
from kvant.cli.doctor import doctor
from kvant.cli.eval import evaluation
from kvant.cli.formats import formats
from kvant.cli.inspect import inspect
from kvant.cli.plan import plan
from kvant.cli.run import run
from kvant.cli.serve import serve
from kvant.cli.store import store
from kvant.exit_codes import command

NAMES = (
    *("append", "attend", "batch", "conversations", "decode"),
    *("engine", "prefill", "prefixes", "products", "scale", "serve", "stores"),
)


class Benches(TyperGroup):
    """The benchmarks, as subcommands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(NAMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in NAMES:
            raise ValueError(f"kvant bench {cmd_name}: known are {', '.join(NAMES)}")
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(import_module(f"kvant.bench.{cmd_name}").main)
        return typer.main.get_command(app)


bench = typer.Typer(cls=Benches, no_args_is_help=True)


@bench.callback()
def about_bench() -> None:
    """Measure: a table, then one line of JSON, or that alone."""


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(chat)
app.command()(batch)
app.command()(serve)
app.command()(formats)
app.command()(plan)
app.command("eval")(evaluation)
app.command()(inspect)
app.command()(doctor)
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"kvant {version('kvant')}")
        raise typer.Exit


@app.callback()
def about(
    told: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version."),
    ] = False,
) -> None:
    """kvant: language models on a compressed key-value cache."""


def main() -> None:
    """What `kvant_command` calls."""
    command(app)
