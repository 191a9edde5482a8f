"""The command itself: its subcommands; what a mistake looks like is said in kvant.bench.endings."""

from __future__ import annotations

import typer

from kvant.bench.endings import command
from kvant.cli.bench import bench
from kvant.cli.chat import chat
from kvant.cli.eval import evaluation
from kvant.cli.inspect import inspect
from kvant.cli.plan import plan
from kvant.cli.run import run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(run)
app.command()(chat)
app.command()(plan)
app.command("eval")(evaluation)
app.command()(inspect)
app.add_typer(bench, name="bench")


@app.callback()
def about() -> None:
    """kvant: language models on a compressed key-value cache."""


def main() -> None:
    """The entry point that the installation makes."""
    command(app)
