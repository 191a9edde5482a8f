"""`kvant chat`: a conversation, a line at a time; each turn re-uses all that was computed before.

On a terminal it asks; in a pipe it reads lines and prints replies. Ctrl-C ends a reply, which stays
as far as it came, and at the prompt the conversation.
"""

from __future__ import annotations

import json as json_text
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from kvant.bench.endings import complain
from kvant.cli import options
from kvant.cli.checks import checked_text
from kvant.cli.opening import Named, Wanted
from kvant.cli.reply import Reading, Reply, show, story
from kvant.cli.verbs import HELP, Branches, told
from kvant.errors import CacheError


def chat(
    model: options.Model = None,
    trust_remote_code: options.TrustRemoteCode = False,
    system: Annotated[str | None, Option(help="What the model is told first.")] = None,
    kv_cache: options.KVCache = None,
    kv_window_size: options.WindowSize = None,
    kv_window_keep: options.WindowKeep = None,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    max_context: options.MaxContext = None,
    strategy: options.Strategy = "always",
    threshold: options.Threshold = 512,
    budget: options.Budget = None,
    prefill_chunk: options.PrefillChunk = 512,
    draft: options.Draft = None,
    backend: options.Backend = None,
    guard: options.Guard = True,
    load: options.Load = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    stats: options.Stats = False,
    json: options.Json = False,
) -> None:
    """Talk with a model; /help says what else there is."""
    kept = (kv_cache, kv_window_size, kv_window_keep, max_context, strategy, threshold, budget)
    placed = (guard, trust_remote_code, device, dtype, prefill_chunk, backend)
    wanted = Wanted(model, *kept, draft, load, *placed)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    asked = drawn | {"seed": seed, "max_new_tokens": max_new_tokens}
    if system is not None and load is not None:
        raise ValueError("--system beside --load: the file says what the model was told first")
    session = wanted.session(asked, template=True, system=system)
    talk = Talk(Branches(session), asked, Named.of(wanted, session), stats=stats, quiet=json)
    talk.until_end()
    if json:
        turns = [{"message": turn.message, "reply": turn.reply} for turn in talk.session.turns]
        print(json_text.dumps({"turns": turns, "cache": talk.session.stats()}))


@dataclass
class Talk:
    """The loop of a conversation."""

    branches: Branches
    asked: dict[str, Any]
    named: Named
    stats: bool
    quiet: bool

    @property
    def session(self) -> Any:
        return self.branches.now

    def until_end(self) -> None:
        asking = sys.stdin is not None and sys.stdin.isatty()
        if asking:
            show(HELP)
        while (line := _line(asking)) is not None:
            if line.startswith("/"):
                if line.split()[0] in ("/quit", "/exit"):
                    return
                self._verb(line)
            elif line.strip():
                self._say(line)

    def _verb(self, line: str) -> None:
        """A mistake is said, and the conversation goes on."""
        try:
            show(told(self.branches, line))
        except (CacheError, ValueError, OSError) as error:
            complain(str(error))

    def _say(self, line: str) -> None:
        reply, before = Reply(), len(self.session.stats()["recoded"])
        with Reading(quiet=self.quiet) as reading:
            try:
                steps = self.session.send(line, **self.asked, progress=reading.show)
                reply.take(steps, reading, before="", quiet=self.quiet)
            except KeyboardInterrupt:
                print()
            except CacheError as error:  # the context is full, or the template refuses it
                complain(str(error))
                return
        if self.stats:
            cache = self.session.stats()
            named = self.named.now(self.session)
            for line in [*story(cache["recoded"][before:]), reply.line(named, cache)]:
                show(line)


def _line(asking: bool) -> str | None:
    """The next message; None at the end. Standard output is for replies alone."""
    if asking:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return checked_text(input(), "what was typed")
    except (EOFError, KeyboardInterrupt, RuntimeError):  # the last: there is no standard input
        return None
