"""Decode tokens by a forward that is captured once and then replayed.

capture.py captures the forward: on a GPU as a CUDA graph, on a CPU as calls of native kernels.

    plan_tokens  ->  replay: q, k, v; store the rows; attend  ->  commit_tokens
    allocates the slots of the rows                              adopts the next state

A forward has one token of each sequence, or on a CPU also its drafts. After it, the cache is as
ordinary forwards would have left it. Pages that fall due are sealed by `plan_tokens`, or on a CPU
by the replay. A graph is valid while tensors keep their
addresses; those of a cache with a capacity never move. If a forward cannot be captured, `refusal`
has the reason, and ordinary forwards decode instead.

A Replayer keeps the weights that a graph reads alive, but not the cache. It detects a change of the
model after at most MODEL_CHECK_INTERVAL forwards, or when another cache is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer

from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.cache.tokens import commit_tokens, list_page_buffers, plan_tokens, record_sealed_pages
from kvant.contracts import PagedTensors, View
from kvant.errors import CapacityError, UnsupportedView
from kvant.hf.attention import use_kvant_attention
from kvant.hf.cache import TransformersCache
from kvant.hf.handles import PendingAttention
from kvant.hf.layers import AttentionLayer
from kvant.hf.model import has_hooks, make_comparable, named_attributes
from kvant.native import get_library
from kvant.page_table import AppendPlan
from kvant.platform.torch_runtime import no_inference_mode
from kvant.replay.cache import ReplayCache
from kvant.replay.capture import (
    CaptureFunction,
    Replay,
    ReplayBuffers,
    StaticForward,
    capture_forward,
    capture_graph,
    make_capture_function,
)
from kvant.replay.steps import (
    DecodeStep,
    NativeDecodeStep,
    StaticNativePageTable,
    StaticPageTable,
    TritonDecodeStep,
)
from kvant.weights.norms import is_fused
from kvant.weights.packed_weight import get_weight_address, get_weight_memory


class ReplayBackend(NamedTuple):
    """The classes and rules of replay on one type of device."""

    make_page_table: Callable[[AppendPlan, torch.device], StaticPageTable]
    make_step: Callable[[View, Any], DecodeStep]  # Any: what make_page_table returns
    num_warmup_forwards: int  # ordinary forwards before a capture, which costs several of them
    runs_eagerly_first: bool  # run new steps once before their capture
    seals_pages: bool  # a step also copies and seals the pages that fall due
    enables_kvant_attention: bool  # switch to kvant's attention: the model may not be attached


TRITON_REPLAY = ReplayBackend(
    StaticTritonPageTable,
    TritonDecodeStep.from_view,
    num_warmup_forwards=0,
    runs_eagerly_first=True,
    seals_pages=False,
    enables_kvant_attention=True,
)
NATIVE_REPLAY = ReplayBackend(
    StaticNativePageTable,
    NativeDecodeStep.from_view,
    num_warmup_forwards=4,
    runs_eagerly_first=False,
    seals_pages=True,
    enables_kvant_attention=False,
)


def explain_unreplayable(model: PreTrainedModel) -> str | None:
    """Return the reason why a replay would differ from the model, None if it would not."""
    if model.training:
        return "the model is in training mode"
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        return f"the model lies on {', '.join(sorted(devices))}"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast caches converted weights, which a replay would read for ever"
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "hooks of all modules are registered, which a replay does not call"
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None:
            return f"{name or 'the model'} is compiled, which a replay would undo"
        if has_hooks(module) or "_hf_hook" in vars(module):
            return f"{name or 'the model'} has hooks, which a replay does not call"
        if "forward" in vars(module) and not is_fused(module):
            return f"{name or 'the model'} has a forward of its own, which a replay does not call"
    return None


def collect_baked_values(model: PreTrainedModel) -> list[object]:
    """Return the values that a capture fixes: modes, addresses, and attributes of modules."""
    addresses = [get_weight_address(x) for x in chain(model.parameters(), model.buffers())]
    values = ((name, make_comparable(value)) for name, value in named_attributes(model))
    return [get_torch_modes(), *addresses, *values]


def get_torch_modes() -> tuple[object, ...]:
    """Return the global settings that a capture fixes."""
    return torch.get_num_threads(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


log = logging.getLogger("kvant")
MODEL_CHECK_INTERVAL = 64  # forwards; a check of all modules takes as long as some layers
FAILED_CAPTURES: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # with reasons
# (ids [B, T], positions [B, T], cache, T) -> logits [B, T, vocabulary]
ModelForward = Callable[[Tensor, Tensor, Any, int], Tensor]


class ReplayPaused(Exception):
    """A temporary reason not to replay, which may be gone at the next forward."""


class BoundForward(NamedTuple):
    """A forward whose steps are bound to pages at fixed addresses."""

    page_tables: Sequence[StaticPageTable]  # by layer group
    steps: Sequence[DecodeStep]  # by attention layer
    inputs: Tensor  # [2, B, T]: the tokens, and their positions
    run: StaticForward  # the forward; once captured, its replay
    has_run: bool = False
    is_captured: bool = False


class ReplayedForward(NamedTuple):
    """The state after a replayed forward; the next one compares it with the current state."""

    cache: ref[TransformersCache]
    change_counts: tuple[int, int]
    num_appended_forwards: int  # of the cache
    buffers: list[ref[PagedTensors]]  # keys of each layer
    modes: tuple[object, ...]

    def is_unchanged(self, cache: TransformersCache) -> bool:
        """Whether nothing else has changed the cache or its buffers since."""
        if cache.context.change_counts != self.change_counts:
            return False
        # Another cache of the same pool may have reallocated its buffers.
        buffers = list_page_buffers(cache.states)
        pairs = zip(buffers, self.buffers, strict=True)
        return all(sides["keys"] is old() for sides, old in pairs)

    def has_same_model(self, cache: TransformersCache) -> bool:
        """Whether the model needs no check: all forwards of the cache since were replayed."""
        if self.cache() is not cache or self.modes != get_torch_modes():
            return False
        return cache.states.holder.num_appended_forwards == self.num_appended_forwards


class Replayer:
    """Replayed forwards of one model over one set of pools, of one number of tokens.

    The capture is reused for other caches with the same number of sequences in the same pools.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_forward: ModelForward,
        capture: CaptureFunction,
        backend: ReplayBackend = TRITON_REPLAY,
        *,
        num_new: int = 1,
    ) -> None:
        """Replay forwards of `num_new` tokens of each sequence; on a GPU, of 1."""
        self.model = model
        self.model_forward = model_forward
        self.capture = capture
        self.backend = backend
        self.num_new = num_new
        self.refusal: str | None = None
        # The error of a replay; it becomes the refusal once an ordinary forward succeeds.
        self._pending_refusal: str | None = None
        self._capture_failed = False  # whether the pending error came from the capture
        self._baked_values: list[object] = []  # of the model
        self._keepalive: list[Any] = []  # memory of the weights, which the graph reads
        self._num_forwards = 0
        self._num_warmups = 0  # ordinary forwards so far
        self.is_warming_up = False  # the newest forward came before or during a capture
        # Drafts follow many single tokens, so their captures pay at once.
        self._min_warmups = backend.num_warmup_forwards if num_new == 1 else 0
        # One assignment replaces each, so an interrupt leaves the old one or the new one.
        self._bound: BoundForward | None = None
        self._last_forward: ReplayedForward | None = None

    def compute_logits(
        self, cache: TransformersCache, tokens: Tensor, positions: Tensor
    ) -> Tensor | None:
        """Replay the forward of `tokens` [B, T]; return logits that are valid until the next.

        Return None if no replay is possible: run an ordinary forward, then call `confirm_forward`.
        """
        self._pending_refusal, self._capture_failed, self.is_warming_up = None, False, False
        refusal = self.refusal or FAILED_CAPTURES.get(self.model)
        if refusal is None:
            try:
                if self._num_warmups < self._min_warmups:
                    if not self._num_warmups:  # a later change of the model restarts the warmup
                        self._save_baked_values(collect_baked_values(self.model))
                    self._num_warmups += 1
                    self.is_warming_up = True
                    return None
                return self._replay(cache, torch.stack((tokens, positions)))
            except CapacityError:  # the cache is full, or the tokens need an ordinary append
                return None
            except ReplayPaused as error:
                refusal = str(error)
            except UnsupportedView as error:
                refusal = self.refusal = str(error)
            except Exception as error:  # a capture may fail with any error
                refusal = self._pending_refusal = _format_error(error)
            if self.refusal or self._pending_refusal:
                self._bound = self._last_forward = None
                self._keepalive, self._baked_values = [], []
            log.info("tokens are not replayed: %s", refusal)
        cache.context.replay_stats.refusal = refusal
        return None

    def confirm_forward(self) -> None:
        """Make the error of a replay final: an ordinary forward succeeded on the same tokens."""
        if self._pending_refusal is not None:
            self.refusal = self._pending_refusal
            if self._capture_failed and self.num_new == 1:  # do not try again for other caches
                FAILED_CAPTURES[self.model] = self._pending_refusal

    def _save_baked_values(self, values: list[object]) -> None:
        """Keep the baked values, and the memory of the weights."""
        self._keepalive = [
            get_weight_memory(x) for x in chain(self.model.parameters(), self.model.buffers())
        ]
        self._baked_values = values

    def _check_backend(self, requested: str | None) -> None:
        if self._bound is not None and requested not in (None, self._bound.steps[0].backend):
            raise ReplayPaused(
                f"backend={requested!r} is requested, but the replay uses "
                f"{self._bound.steps[0].backend}"
            )

    def _replay(self, cache: TransformersCache, inputs: Tensor) -> Tensor:
        layers, states, last = _list_attention_layers(cache), cache.states, self._last_forward
        self._check_backend(states.backend)
        buffers = list_page_buffers(states)  # kept until the commit: another cache may replace them
        same_model = last is not None and last.has_same_model(cache)
        unchanged = same_model and last is not None and last.is_unchanged(cache)
        self._last_forward = None  # until these tokens are committed
        plans = plan_tokens(states, self.num_new, seals=self.backend.seals_pages)
        self._num_forwards += 1
        if not same_model or self._num_forwards % MODEL_CHECK_INTERVAL == 0:
            self._check_model()
        bound = self._bound
        is_steady = self.num_new == 1 and all(plan.is_steady for plan in plans)
        if unchanged and bound is not None and is_steady:
            for page_table in bound.page_tables:
                page_table.advance()
        else:
            buffers = list_page_buffers(states)
            bound = self._bound = self._bind_pages(cache, layers, plans)
            self._check_backend(states.backend)
        bound.inputs.copy_(inputs)
        out = self._run_forward()
        backend = bound.steps[0].backend
        if not commit_tokens(states, backend, buffers):
            raise ReplayPaused("another cache reallocated the pages during the replay")
        if self.backend.seals_pages and any(len(plan.seals) for plan in plans):
            record_sealed_pages(states, plans, backend)
        for layer in layers:
            layer.record_replay()
        for step in bound.steps:
            step.release_pages()
        self._last_forward = ReplayedForward(
            ref(cache),
            cache.context.change_counts,
            states.holder.num_appended_forwards,
            [ref(sides["keys"]) for sides in buffers],
            get_torch_modes(),
        )
        stats = cache.context.replay_stats
        if self._bound is not None and self._bound.is_captured:
            stats.num_tokens += self.num_new
        stats.refusal = None
        return out

    def _check_model(self) -> None:
        """Drop the capture if the model has changed; raise ReplayPaused if a replay must wait."""
        if (reason := explain_unreplayable(self.model)) is not None:
            raise ReplayPaused(reason)
        if (current := collect_baked_values(self.model)) != self._baked_values:
            previous = self._baked_values
            self._bound = None
            self._save_baked_values(current)
            if previous and self._min_warmups:
                self._num_warmups, self.is_warming_up = 0, True
                raise ReplayPaused("the model has changed")

    def _bind_pages(
        self, cache: TransformersCache, layers: list[AttentionLayer], plans: list[AppendPlan]
    ) -> BoundForward:
        """Bind the steps to the current pages; if tensors moved, drop the capture."""
        views = [
            layer.paged_layer.make_view(plans[layer.paged_layer.leaf.group]) for layer in layers
        ]
        if self._bound is not None and _rebind(self._bound, views, plans):
            return self._bound
        self._bound = None
        device = self.model.device
        tables = [self.backend.make_page_table(plan, device) for plan in plans]
        with no_inference_mode():
            shape = 2, plans[0].old_table.batch, self.num_new
            inputs = torch.zeros(shape, dtype=torch.int64, device=device)
        pairs = zip(views, (tables[layer.paged_layer.leaf.group] for layer in layers), strict=True)
        steps = [self.backend.make_step(*pair) for pair in pairs]
        forward = self._make_forward(ReplayCache(cache.layers, steps))
        return BoundForward(tables, steps, inputs, forward)

    def _make_forward(self, cache: ReplayCache) -> StaticForward:
        num_new = self.num_new

        def forward(ids: Tensor, positions: Tensor) -> Tensor:
            with (
                use_kvant_attention(self.model)
                if self.backend.enables_kvant_attention or num_new > 1  # drafts have a mask
                else nullcontext()
            ):
                return self.model_forward(ids, positions, cache, num_new)

        return forward

    def _run_forward(self) -> Tensor:
        """Run the forward; on a GPU first without a capture, so that kernels are compiled."""
        bound = self._bound
        assert bound is not None
        arguments = bound.inputs[0], bound.inputs[1]
        self.is_warming_up = not bound.is_captured
        if not bound.is_captured and (bound.has_run or not self.backend.runs_eagerly_first):
            try:
                captured = self.capture(bound.run, *arguments)
            except (torch.OutOfMemoryError, UnsupportedView):
                raise
            except Exception:
                self._capture_failed = True
                raise
            bound = self._bound = bound._replace(run=captured, is_captured=True)
            if isinstance(captured, Replay):
                return captured.out
        if not bound.has_run:
            self._bound = bound._replace(has_run=True)
        return bound.run(*arguments)


def get_graph_capture(model: PreTrainedModel) -> CaptureFunction | None:
    """Return the function that captures CUDA graphs of a model; None on other devices."""
    return capture_graph if model.device.type == "cuda" else None


def make_replayer(
    model: PreTrainedModel,
    model_forward: ModelForward,
    capture: CaptureFunction | None,
    *,
    compile_config: CompileConfig | None = None,
    buffers: ReplayBuffers | None = None,
    num_new: int = 1,
) -> Replayer | None:
    """Make a replayer for the number of sequences that it sees first, of `num_new` tokens each.

    `capture` captures graphs, of a compiled forward if there is a `compile_config`. None: natively,
    where replayers that never run at the same time may share `buffers`. Return None if such
    forwards cannot be replayed, as drafts by a graph.
    """
    if capture is not None:
        if num_new > 1:
            return None
        return Replayer(model, model_forward, make_capture_function(capture, compile_config))
    if model.device.type != "cpu" or get_library().functions is None:
        return None
    native = partial(capture_forward, buffers=buffers)
    return Replayer(model, model_forward, native, NATIVE_REPLAY, num_new=num_new)


def _rebind(bound: BoundForward, views: Sequence[View], plans: Sequence[AppendPlan]) -> bool:
    """Bind the steps to later views and plans; return False if the capture does not fit them."""
    if len(bound.steps) != len(views) or len(bound.page_tables) != len(plans):
        return False
    pairs = zip(bound.steps, views, strict=True), zip(bound.page_tables, plans, strict=True)
    return all(step.rebind(view) for step, view in pairs[0]) and all(
        table.update(plan) for table, plan in pairs[1]
    )


def _format_error(error: Exception) -> str:
    """Format an error as one line; some messages contain whole programs."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _list_attention_layers(cache: TransformersCache) -> list[AttentionLayer]:
    """Return the attention layers of a cache; raise for a layer that cannot be replayed."""
    layers = [layer for layer in cache.layers if not isinstance(layer, DummyLayer)]
    for layer in layers:
        if type(layer) is not AttentionLayer:
            raise UnsupportedView(f"layers of {type(layer).__name__} cannot be replayed")
        if layer.pending_type is not PendingAttention:
            raise UnsupportedView("layers of latents cannot be replayed")
    return layers
