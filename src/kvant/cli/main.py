"""The command itself: its subcommands; how each ends is said in kvant.exit_codes.

`kvant bench NAME` is a front for `kvant.bench.NAME`, with its options and its function. Commands
import torch when they compute, so help and mistakes are shown at once.
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
from kvant.cli.formats import formats
from kvant.cli.inspect import inspect
from kvant.cli.plan import plan
from kvant.cli.run import run
from kvant.cli.serve import serve
from kvant.cli.store import store
from kvant.exit_codes import run_app

BENCHES = {  # and what the help of `main` of each begins with
    "append": "The cost of one appended token, one layer, bf16, batch 1.",
    "attend": "Attention of the newest tokens, one layer, bf16.",
    "batch": "What sequences of different lengths cost in one forward, and what beams cost.",
    "conversations": (
        "Many users in memory for a few: with prefixes and a store, and from the beginning."
    ),
    "decode": (
        "What decoding costs: a model without a cache, with ours, with peers; or bare caches."
    ),
    "engine": "What serving many requests at once gives, beside what transformers does with them.",
    "prefill": "Reading a prompt, batch 1.",
    "prefixes": "The time to the first token, of prompts that were read before and of others.",
    "products": "Products of few rows with packed weights.",
    "scale": "Simulate how requests go to replicas: what they find there, and who waits.",
    "serve": "Tokens a second and waits of clients of a server, beside the engine itself.",
    "stores": "What decoding beside a writer costs, and how soon a prefix is back.",
}


class Bench(TyperCommand):
    """A benchmark, whose module is imported when its options are read."""

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
            raise ValueError(f"kvant bench {cmd_name}: known are {', '.join(BENCHES)}")
        return Bench(cmd_name, help=BENCHES[cmd_name])


bench = typer.Typer(cls=BenchGroup, no_args_is_help=True, rich_markup_mode=None)


@bench.callback()
def bench_callback() -> None:
    """Measure: a table, then one line of JSON, or that alone."""


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut the names of options
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(chat)
app.command()(batch)
app.command()(serve)
app.command()(formats)
app.command()(plan)
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
    """What `kvant_command` calls."""
    run_app(app)
