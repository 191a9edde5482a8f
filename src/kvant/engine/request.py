"""What somebody asked an engine for, and who still continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from traceback import clear_frames

from torch import Tensor

from kvant.engine.batch import Seat
from kvant.engine.schedule import Job
from kvant.engine.stream import Stream
from kvant.generation.loop import Reply
from kvant.generation.sampling import Drawn, Sampler, drawn
from kvant.generation.settings import Limits


@dataclass(eq=False)
class Choice:
    """One continuation of a prompt."""

    index: int
    reply: Reply
    sampler: Sampler
    seat: Seat


@dataclass(eq=False)
class Request:
    """What was asked, and who still continues it."""

    job: Job
    seat: Seat
    samplers: list[Sampler]  # one for each continuation
    limits: Limits
    logprobs: int
    stream: Stream
    marks: list[int]  # lengths of the prompt at which others may begin to differ
    since: float  # when the last token came, in seconds; before the first, when it was asked
    served: bool = False  # has reading its prompt begun?
    came: range = range(0)  # tokens of the prompt that a store had
    choices: list[Choice] = field(default_factory=list)  # those that go on

    @property
    def seats(self) -> list[Seat]:
        return [choice.seat for choice in self.choices] or [self.seat]

    def end(self, error: BaseException | None = None) -> None:
        """Tell who asked that nothing comes any more."""
        for choice in self.choices:
            self.stream.hold(choice.index, choice.reply.text.rest())
        self.stream.end(error)


def drawn_for(going: Sequence[tuple[Request, Choice]], logits: Tensor) -> list[Drawn | Exception]:
    """The next token of each, all at once; where that fails, one by one."""

    def draw(some: Sequence[tuple[Request, Choice]], rows: Tensor) -> list[Drawn]:
        samplers, before = zip(*((c.sampler, c.reply.tokens) for _, c in some), strict=True)
        return drawn(rows, samplers, before, [request.logprobs for request, _ in some])

    try:
        return [*draw(going, logits)]
    except Exception:
        found: list[Drawn | Exception] = []
        for row, one in enumerate(going):
            try:
                found += draw([one], logits[row : row + 1])
            except Exception as error:
                found.append(error)
        return found


def clear(error: BaseException | None) -> None:
    """Somebody may keep an error, but not the caches that its frames hold."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
