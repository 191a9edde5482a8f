"""The `kvant` command and its subcommands. exit_codes maps their errors to exit codes.

`kvant bench NAME` runs `main` of `kvant.bench.NAME`, with its options. Commands import torch only
to compute, so that help and errors in options appear at once.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvant.cli.batch import batch
from kvant.cli.chat import chat
from kvant.cli.doctor import doctor
from kvant.cli.eval import evaluate_formats
from kvant.cli.formats import formats, plan
from kvant.cli.inspect import inspect
from kvant.cli.recommend import recommend
from kvant.cli.run import run
from kvant.cli.serve import serve
from kvant.cli.store import store
from kvant.platform.terminal import run_app

BENCHES = {  # the first line of each benchmark's help
    "agents": "Measure what share of agents' prompts is reused, and what share could be.",
    "append": "Time one appended token: one layer, bf16, batch 1.",
    "attend": "Time attention of the newest tokens: one layer, bf16.",
    "batch": "Time sequences of different lengths in one forward, or beam search.",
    "conversations": "Measure many users with memory for a few, with prefixes and without.",
    "decode": "Measure decoding: no cache, kvant's caches and peers; or caches alone.",
    "engine": "Measure the throughput of many requests at once, against transformers.",
    "gpu": "Check the kernels on a GPU, and the speeds that they must reach.",
    "prefill": "Measure prefill of one prompt, batch 1.",
    "prefixes": "Time the first token of prompts with and without a cached prefix.",
    "weights": "Time products of rows with weights in 16, 8 and 4 bits.",
    "scale": "Simulate how routing to replicas affects prefix reuse and waiting times.",
    "serve": "Measure the speed and the waiting times of a server's clients, against the engine.",
    "stores": "Measure decoding during writes to a store, and the time to restore a prefix.",
}


class Bench(TyperCommand):
    """A benchmark; imports its module only when its arguments are parsed."""

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(self.name)(import_module(f"kvant.bench.{self.name}").main)
        command = typer.main.get_command(app)
        return command.make_context(info_name, args, parent=parent, **extra)


class BenchGroup(TyperGroup):
    """The benchmarks, as subcommands."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in BENCHES:
            raise ValueError(f"kvant bench {cmd_name}: choose one of {', '.join(BENCHES)}")
        return Bench(cmd_name, help=BENCHES[cmd_name])


bench = typer.Typer(
    cls=BenchGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a benchmark; prints a table and one line of JSON.",
)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables truncate the names of options
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(chat)
app.command()(batch)
app.command()(serve)
app.command()(formats)
app.command()(plan)
app.command()(recommend)
app.command("eval")(evaluate_formats)
app.command()(inspect)
app.command()(doctor)
app.add_typer(store, name="store")
app.add_typer(bench, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"kvant {version('kvant')}")
        raise typer.Exit


@app.callback()
def main_callback(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """kvant: language models on a compressed key-value cache."""


def main() -> None:
    """Run the command line; the entry point of `kvant_command`."""
    run_app(app)
