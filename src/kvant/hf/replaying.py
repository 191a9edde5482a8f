"""Tokens one after the other through a forward that is captured once and then replayed.

On a GPU it is captured as a graph, on a CPU it is recorded (recording.py).

The cache expects a token before, which makes room, and is told after: it is at every token what
ordinary forwards would have made it. What falls due is sealed before, or on a CPU by the step. A
graph lasts while memory stays where it is, which a capacity sees to. What cannot be captured is
told by `refusal`, and ordinary forwards go on.

Holds the memory that a graph reads, but not the cache. What is changed of the model during a reply
is noticed within so many tokens (CHECKED), or when something else is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from kvant.attention import Step
from kvant.attention.native.step import Place as StandingPlace
from kvant.attention.native.step import Step as NativeStep
from kvant.attention.triton.forms import MovingPlace
from kvant.contracts import Mask, View
from kvant.errors import CacheError, CapacityError, UnsupportedView
from kvant.extent import Change
from kvant.hf.attention import switched
from kvant.hf.cache import HostCache
from kvant.hf.context import Notes
from kvant.hf.detect import narrows
from kvant.hf.handles import pair
from kvant.hf.layers import AttentionLayer
from kvant.hf.modules import held, plain
from kvant.hf.reading import Question, Reading, SideName
from kvant.modes import no_inference_mode
from kvant.norms import is_fused
from kvant.recording import Replay
from kvant.weights import memory, place


@dataclass(eq=False, kw_only=True)
class StepReading(Reading):
    """The rows of one layer, behind which those of a token are put when attention asks."""

    step: Step | NativeStep
    new: tuple[Tensor, Tensor]

    def over(self, q: Tensor, view: View, rule: Mask | Tensor | None, question: Question) -> Tensor:
        if isinstance(rule, Tensor) or view is not self.view:
            raise UnsupportedView("a mask that is a tensor")
        step = self.step if rule is None else replace(self.step, mask=rule)
        return step(
            q,
            *self.new,
            scale=question.scale,
            softcap=question.softcap,
            sink_logits=question.sink_logits,
        )

    def rows(self, side: SideName, why: str) -> Tensor:
        raise UnsupportedView(f"{why} needs dense rows")


class StepLayer(CacheLayerMixin):
    """One attention layer; `step` is where its rows go."""

    def __init__(self, layer: AttentionLayer, step: Step | NativeStep) -> None:
        self.step = step
        self.is_sliding = layer.is_sliding
        self.narrow = narrows(layer.described, layer.recipe)
        self.window, self.packs = layer.described.window, layer.described.packs
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Everything is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        source = StepReading(
            self.step.pages,
            1,
            self.get_mask_sizes(1)[0],
            key_states.dtype,
            Notes(),
            self.narrow,
            packs=self.packs,
            step=self.step,
            new=(key_states, value_states),
        )
        return pair(source, key_states.dtype, key_states.device)

    def get_seq_length(self) -> Tensor:
        """Columns before this token."""
        return self.step.place.columns - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many columns as there may be: a mask that is made all the same is refused."""
        most = self.step.place.tokens
        return most if self.window is None else min(most, self.window), 0

    def get_max_length(self) -> int:
        return -1

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError("a forward that is captured may not change its cache but by a token")

    crop = reorder_cache = batch_select_indices = batch_repeat_interleave = reset


class StepCache(TransformersCache):
    """All layers of a cache; those that remember nothing stay what they are."""

    def __init__(self, layers: Sequence[Any], steps: Sequence[Step | NativeStep]) -> None:
        given = iter(steps)
        made = [StepLayer(x, next(given)) if isinstance(x, AttentionLayer) else x for x in layers]
        super().__init__(layers=made)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        first = next(layer for layer in self.layers if isinstance(layer, StepLayer))
        return first.get_seq_length()


class Steps(NamedTuple):
    """How a device takes one token after the other."""

    place: type[MovingPlace] | type[StandingPlace]
    step: type[Step] | type[NativeStep]
    before: int  # ordinary forwards, as capturing takes as long as some
    tried: bool  # is the first forward one of steps that is not captured?
    seals: bool  # does a step copy and seal what falls due with its row?
    switches: bool  # has a stock model to be given our attention for it?


BY_TRITON = Steps(MovingPlace, Step, before=0, tried=True, seals=False, switches=True)
NATIVELY = Steps(StandingPlace, NativeStep, before=4, tried=False, seals=True, switches=False)
Forward = Callable[[Tensor, Tensor], Tensor]  # of tensors that keep their addresses
Capture = Callable[[Forward, Tensor, Tensor], Forward]


def captured(forward: Forward, ids: Tensor, lengths: Tensor) -> Forward:
    """A replay, which reads the same two tensors whatever it is given, and writes over its output.

    An operation that cannot be captured, as one that waits for the device, raises an error.
    """
    _check_unsynchronized(forward, ids, lengths)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ids.device)
    with (
        torch.cuda.device(ids.device),
        torch.cuda.stream(stream),  # where a capture fails, its own would stay the current one
        torch.cuda.graph(
            graph,
            # Without one it is that of the device which captured first.
            stream=torch.cuda.Stream(ids.device),  # type: ignore[no-untyped-call]
            capture_error_mode="thread_local",  # other threads may do what it would forbid them
        ),
    ):
        out = forward(ids, lengths)

    def replay(*same: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def _check_unsynchronized(forward: Forward, ids: Tensor, lengths: Tensor) -> None:
    """An error where something waits for the device, which leaves more behind in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(ids, lengths)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def capturing(capture: Capture, config: CompileConfig | None) -> Capture:
    """What captures a forward, compiled as the host's configuration of that says."""
    return capture if config is None else partial(_compiled, capture, config)


def _compiled(
    capture: Capture, config: CompileConfig, forward: Forward, ids: Tensor, lengths: Tensor
) -> Forward:
    from torch.fx.experimental.proxy_tensor import make_fx

    # Handles are nothing that a compiler understands; the operators behind them are.
    graph = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    how = {"backend": config.backend, "options": config.options}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, **how)
    compiled(ids, lengths)  # compiles, which cannot be captured
    return capture(compiled, ids, lengths)


def unfit(model: PreTrainedModel) -> str | None:
    """Why a replay would not do what the model does."""
    if model.training:
        return "the model is in training mode"
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        return f"the model lies on {', '.join(sorted(devices))}"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast keeps what it made of the weights, and a replay would read that for ever"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in vars(module):
            return f"{name or 'the model'} has hooks, which a replay does not call"
        if "forward" in vars(module) and not is_fused(module):
            return f"{name or 'the model'} has a forward of its own, which a replay does not call"
    return None


def baked(model: PreTrainedModel) -> list[object]:
    """Where its tensors lie, and the plain values that its modules hold, as of adapters."""
    found = [place(x) for x in chain(model.parameters(), model.buffers())]
    values = ((name, plain(value)) for name, value in held(model))
    return [modes(), *found, *values]


def modes() -> tuple[object, ...]:
    """What else decides what is computed, and by how many threads."""
    return torch.get_num_threads(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


log = logging.getLogger("kvant")
CHECKED = 64  # looking at all modules takes as long as some layers
FAILED: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # to be captured, and why
Call = Callable[[Tensor, Tensor, Any], Tensor]  # (ids [B, 1], positions [B, 1], cache) -> logits


class Passing(Exception):
    """What keeps a model from being replayed now, and may be over at the next token."""


class Replayer:
    """One model on one memory; `call` is a forward of the model.

    It goes on from cache to cache, as sequences come and go, while there are as many of them and
    their pages lie in the same memory.
    """

    def __init__(
        self, model: PreTrainedModel, call: Call, capture: Capture, steps: Steps = BY_TRITON
    ) -> None:
        self.model = model
        self.call = call
        self.capture = capture
        self.steps = steps
        self.refusal: str | None = None
        self._doubt: str | None = None  # the error of a replay, until an ordinary forward went well
        self._uncaptured = False  # was it the capture that died?
        self._ids = torch.zeros(0, 1, dtype=torch.int64)
        self._baked: list[object] = []  # of the model,
        self._held: list[Any] = []  # and the memory of its tensors, which the graph reads
        self._places: list[MovingPlace | StandingPlace] = []  # of the kinds
        self._steps: list[Step | NativeStep] = []
        self._forward: Forward | None = None  # for these steps; the second time it is a replay
        self._ran = self._captured = False
        self._tokens = 0  # since the model was looked at first
        self._waited = 0  # ordinary forwards before the first of steps
        self._left: ref[HostCache] | None = None  # the newest cache,
        self._changes = (-1, -1)  # its changes when it was left,
        self._lie: list[Any] = []  # where its pages lay,
        self._modes = modes()  # and how PyTorch computed

    def logits(self, cache: HostCache, tokens: list[int]) -> Tensor | None:
        """After one more token of each sequence, until the next one.

        None where an ordinary forward has to do it, which `passed` is told of.
        """
        self._doubt, self._uncaptured = None, False
        refusal = self.refusal or FAILED.get(self.model)
        if refusal is None:
            try:
                if self._waited < self.steps.before:
                    self._wait()
                    return None
                return self._logits(cache, tokens)
            except CapacityError:  # there is no room, or it does what a step does not
                return None
            except Passing as error:
                refusal = str(error)
            except UnsupportedView as error:
                refusal = self.refusal = str(error)
            except Exception as error:  # a model may do anything that a graph cannot hold
                refusal = self._doubt = _told(error)
            if self.refusal or self._doubt:
                self._begin()
                self._left, self._lie, self._held, self._baked = None, [], [], []
            log.info("tokens are not replayed: %s", refusal)
        cache.context.replays.refusal = refusal
        return None

    def passed(self) -> None:
        """An ordinary forward took the token: what a replay died of was no fault of the token's."""
        if self._doubt is not None:
            self.refusal = self._doubt
            if self._uncaptured:  # the next cache need not try again
                FAILED[self.model] = self._doubt

    def _wait(self) -> None:
        """An ordinary forward is to come first; from it on the model is to stay what it is."""
        if not self._waited:
            self._see(baked(self.model))
        self._waited += 1

    def _see(self, now: list[object]) -> None:
        self._held = [memory(x) for x in chain(self.model.parameters(), self.model.buffers())]
        self._baked = now

    def _begin(
        self,
        places: Sequence[MovingPlace | StandingPlace] = (),
        steps: Sequence[Step | NativeStep] = (),
        forward: Forward | None = None,
    ) -> None:
        """Anew, with these steps, in one call: an interrupt finds all of the old or of the new."""
        fresh = {"_ran": False, "_captured": False, "_forward": forward}
        self.__dict__.update(fresh, _places=list(places), _steps=list(steps))

    def _check_backend(self, asked: str | None) -> None:
        if self._steps and asked not in (None, self._steps[0].backend):
            raise Passing(f"backend={asked!r} is asked for, and {self._steps[0].backend} would do")

    def _logits(self, cache: HostCache, tokens: list[int]) -> Tensor:
        layers, states = _attending(cache), cache.states
        self._check_backend(states.backend)
        same = self._left is not None and self._left() is cache
        lie = states.memory
        alike = same and cache.context.changes == self._changes
        alike = alike and all(map(is_, lie, self._lie))  # whoever shares the pages may need more
        alike = alike and self._modes == modes()
        self._left = None  # until the token is there
        changes = states.expect(seals=self.steps.seals)
        self._tokens += 1
        if not alike or self._tokens % CHECKED == 0:
            self._check()
        if alike and self._steps and all(change.calm for change in changes):
            for place in self._places:
                place.advance()
        else:
            lie = states.memory
            self._follow(cache, layers, changes)
            self._check_backend(states.backend)
        self._ids.copy_(torch.tensor(tokens)[:, None])
        out = self._run()
        if not states.arrive(self._steps[0].backend, lie):
            raise Passing("another cache moved the pages meanwhile")
        if self.steps.seals and any(len(change.seals) for change in changes):
            for layer in layers:
                layer.state.sealed(changes[layer.state.kind], self._steps[0].backend)
        for layer in layers:
            layer.arrive()
        self._changes, self._lie, self._modes = cache.context.changes, lie, modes()
        self._left = ref(cache)
        cache.context.replays.tokens += self._captured
        cache.context.replays.refusal = None
        return out

    def _check(self) -> None:
        """Is the model what it was? Else begin anew."""
        if (reason := unfit(self.model)) is not None:
            raise Passing(reason)
        if (now := baked(self.model)) != self._baked:
            known = self._baked
            self._begin()
            self._see(now)
            if known and self.steps.before:
                self._waited = 0
                raise Passing("something about the model has changed")

    def _follow(
        self, cache: HostCache, layers: list[AttentionLayer], changes: list[Change]
    ) -> None:
        """Go on where pages lie now; where memory is another, begin anew."""
        pages = [layer.state.expected(changes[layer.state.kind]) for layer in layers]
        moved = len(self._steps) != len(pages) or len(self._places) != len(changes)
        moved = moved or any(
            not step.follow(one) for step, one in zip(self._steps, pages, strict=True)
        )
        moved = moved or any(  # one of them ends the graph of all
            not place.follow(change) for place, change in zip(self._places, changes, strict=True)
        )
        if not moved:
            return
        self._begin()
        device = self.model.device
        places = [self.steps.place(change, device) for change in changes]
        with no_inference_mode():
            self._ids = torch.zeros(changes[0].before.batch, 1, dtype=torch.int64, device=device)
        both = zip(pages, (places[layer.state.kind] for layer in layers), strict=True)
        steps = [self.steps.step.of(*given) for given in both]  # type: ignore[arg-type]
        self._begin(places, steps, self._stepping(StepCache(cache.layers, steps)))

    def _stepping(self, cache: StepCache) -> Forward:
        def forward(ids: Tensor, lengths: Tensor) -> Tensor:
            with switched(self.model) if self.steps.switches else nullcontext():
                return self.call(ids, lengths[:, None] - 1, cache)

        return forward

    def _run(self) -> Tensor:
        """On a GPU the first time as it is: kernels are compiled, what is made once is made."""
        assert self._forward is not None
        given = self._ids, self._places[0].lengths
        if not self._captured and (self._ran or not self.steps.tried):
            try:
                now = self.capture(self._forward, *given)
            except (torch.OutOfMemoryError, UnsupportedView):
                raise
            except Exception:
                self._uncaptured = True
                raise
            self.__dict__.update(_forward=now, _captured=True)  # in one call, as in _begin
            if isinstance(now, Replay):
                return now.out
        self._ran = True
        return self._forward(*given)


def _told(error: Exception) -> str:
    """In one line: some print whole programs."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _attending(cache: HostCache) -> list[AttentionLayer]:
    """The layers that take rows; some of a model's may remember nothing."""
    layers = [layer for layer in cache.layers if not isinstance(layer, DummyLayer)]
    for layer in layers:
        if type(layer) is not AttentionLayer or layer.kind is not Reading:
            kind = "latents" if isinstance(layer, AttentionLayer) else type(layer).__name__
            raise UnsupportedView(f"layers of {kind} take no steps")
    return layers
