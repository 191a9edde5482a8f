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
from transformers.cache_utils import Cache as HFCache
from transformers.cache_utils import CacheLayerMixin, DummyLayer

from kvant.attention import TritonDecodeStep
from kvant.attention.native.decode_step import NativeDecodeStep as NativeStep
from kvant.attention.native.decode_step import StaticNativePageTable as StandingPlace
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.capture import Replay
from kvant.contracts import Mask, View
from kvant.errors import CacheError, CapacityError, UnsupportedView
from kvant.hf.attention import use_kvant_attention
from kvant.hf.cache import TransformersCache
from kvant.hf.cache_context import AttentionStats
from kvant.hf.handles import make_handles
from kvant.hf.layers import AttentionLayer
from kvant.hf.model_layers import narrows_window
from kvant.hf.module_attributes import make_comparable, named_attributes
from kvant.hf.pending_attention import AttentionCall, PendingAttention, SideName
from kvant.norms import is_fused
from kvant.page_table import AppendPlan
from kvant.torch_modes import no_inference_mode
from kvant.weights import get_weight_address, get_weight_memory


@dataclass(eq=False, kw_only=True)
class PendingReplayAttention(PendingAttention):
    """The rows of one layer, behind which those of a token are put when attention asks."""

    step: TritonDecodeStep | NativeStep
    new_rows: tuple[Tensor, Tensor]

    def attend_view(
        self, q: Tensor, view: View, rule: Mask | Tensor | None, call: AttentionCall
    ) -> Tensor:
        if isinstance(rule, Tensor) or view is not self.view:
            raise UnsupportedView("a mask that is a tensor")
        step = self.step if rule is None else replace(self.step, mask=rule)
        return step(
            q,
            *self.new_rows,
            scale=call.scale,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
        )

    def read_rows(self, side: SideName, reason: str) -> Tensor:
        raise UnsupportedView(f"{reason} needs dense rows")


class ReplayLayer(CacheLayerMixin):
    """One attention layer; `step` is where its rows go."""

    def __init__(self, layer: AttentionLayer, step: TritonDecodeStep | NativeStep) -> None:
        self.step = step
        self.is_sliding = layer.is_sliding
        self.narrows_window = narrows_window(layer.layer_info, layer.recipe)
        self.window, self.model_has_gqa = layer.layer_info.window, layer.layer_info.model_has_gqa
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Everything is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        source = PendingReplayAttention(
            self.step.view,
            1,
            self.get_mask_sizes(1)[0],
            key_states.dtype,
            AttentionStats(),
            self.narrows_window,
            model_has_gqa=self.model_has_gqa,
            step=self.step,
            new_rows=(key_states, value_states),
        )
        return make_handles(source, key_states.dtype, key_states.device)

    def get_seq_length(self) -> Tensor:
        """Columns before this token."""
        return self.step.page_table.columns - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As many columns as there may be: a mask that is made all the same is refused."""
        most = self.step.page_table.capacity
        return most if self.window is None else min(most, self.window), 0

    def get_max_length(self) -> int:
        return -1

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError("a forward that is captured may not change its cache but by a token")

    crop = reorder_cache = batch_select_indices = batch_repeat_interleave = reset


class ReplayCache(HFCache):
    """All layers of a cache; those that remember nothing stay what they are."""

    def __init__(
        self, layers: Sequence[Any], steps: Sequence[TritonDecodeStep | NativeStep]
    ) -> None:
        given = iter(steps)
        made = [ReplayLayer(x, next(given)) if isinstance(x, AttentionLayer) else x for x in layers]
        super().__init__(layers=made)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        first = next(layer for layer in self.layers if isinstance(layer, ReplayLayer))
        return first.get_seq_length()


class ReplayBackend(NamedTuple):
    """How a device takes one token after the other."""

    page_table_type: type[StaticTritonPageTable] | type[StandingPlace]
    step_type: type[TritonDecodeStep] | type[NativeStep]
    num_warmup_forwards: int  # ordinary forwards, as capturing takes as long as some
    runs_eagerly_first: bool  # is the first forward one of steps that is not captured?
    seals_pages: bool  # does a step copy and seal what falls due with its row?
    enables_kvant_attention: bool  # has a stock model to be given our attention for it?


TRITON_REPLAY = ReplayBackend(
    StaticTritonPageTable,
    TritonDecodeStep,
    num_warmup_forwards=0,
    runs_eagerly_first=True,
    seals_pages=False,
    enables_kvant_attention=True,
)
NATIVE_REPLAY = ReplayBackend(
    StandingPlace,
    NativeStep,
    num_warmup_forwards=4,
    runs_eagerly_first=False,
    seals_pages=True,
    enables_kvant_attention=False,
)
StaticForward = Callable[[Tensor, Tensor], Tensor]  # of tensors that keep their addresses
CaptureFunction = Callable[[StaticForward, Tensor, Tensor], StaticForward]


def capture_graph(forward: StaticForward, ids: Tensor, lengths: Tensor) -> StaticForward:
    """A replay, which reads the same two tensors whatever it is given, and writes over its output.

    An operation that cannot be captured, as one that waits for the device, raises an error.
    """
    _check_no_synchronization(forward, ids, lengths)
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

    def replay(*inputs: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def _check_no_synchronization(forward: StaticForward, ids: Tensor, lengths: Tensor) -> None:
    """An error where something waits for the device, which leaves more behind in a capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(ids, lengths)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def make_capture_function(
    capture: CaptureFunction, config: CompileConfig | None
) -> CaptureFunction:
    """What captures a forward, compiled as the host's configuration of that says."""
    return capture if config is None else partial(_compile_and_capture, capture, config)


def _compile_and_capture(
    capture: CaptureFunction,
    config: CompileConfig,
    forward: StaticForward,
    ids: Tensor,
    lengths: Tensor,
) -> StaticForward:
    from torch.fx.experimental.proxy_tensor import make_fx

    # Handles are nothing that a compiler understands; the operators behind them are.
    graph = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    how = {"backend": config.backend, "options": config.options}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, **how)
    compiled(ids, lengths)  # compiles, which cannot be captured
    return capture(compiled, ids, lengths)


def explain_unreplayable(model: PreTrainedModel) -> str | None:
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


def collect_baked_values(model: PreTrainedModel) -> list[object]:
    """Where its tensors lie, and the plain values that its modules hold, as of adapters."""
    found = [get_weight_address(x) for x in chain(model.parameters(), model.buffers())]
    values = ((name, make_comparable(value)) for name, value in named_attributes(model))
    return [get_torch_modes(), *found, *values]


def get_torch_modes() -> tuple[object, ...]:
    """What else decides what is computed, and by how many threads."""
    return torch.get_num_threads(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


log = logging.getLogger("kvant")
MODEL_CHECK_INTERVAL = 64  # looking at all modules takes as long as some layers
FAILED_CAPTURES: WeakKeyDictionary[PreTrainedModel, str] = (
    WeakKeyDictionary()
)  # to be captured, and why
ModelForward = Callable[
    [Tensor, Tensor, Any], Tensor
]  # (ids [B, 1], positions [B, 1], cache) -> logits


class ReplayPaused(Exception):
    """What keeps a model from being replayed now, and may be over at the next token."""


class Replayer:
    """One model on one memory; `call` is a forward of the model.

    It goes on from cache to cache, as sequences come and go, while there are as many of them and
    their pages lie in the same memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_forward: ModelForward,
        capture: CaptureFunction,
        backend: ReplayBackend = TRITON_REPLAY,
    ) -> None:
        self.model = model
        self.model_forward = model_forward
        self.capture = capture
        self.backend = backend
        self.refusal: str | None = None
        self._pending_refusal: str | None = (
            None  # the error of a replay, until an ordinary forward went well
        )
        self._capture_failed = False  # was it the capture that died?
        self._ids = torch.zeros(0, 1, dtype=torch.int64)
        self._baked_values: list[object] = []  # of the model,
        self._keepalive: list[Any] = []  # and the memory of its tensors, which the graph reads
        self._page_tables: list[StaticTritonPageTable | StandingPlace] = []  # of the kinds
        self._steps: list[TritonDecodeStep | NativeStep] = []
        self._forward: StaticForward | None = (
            None  # for these steps; the second time it is a replay
        )
        self._has_run = self._is_captured = False
        self._num_tokens = 0  # since the model was looked at first
        self._num_warmups = 0  # ordinary forwards before the first of steps
        self._last_cache_ref: ref[TransformersCache] | None = None  # the newest cache,
        self._last_change_counts = (-1, -1)  # its changes when it was left,
        self._last_buffers: list[Any] = []  # where its pages lay,
        self._last_modes = get_torch_modes()  # and how PyTorch computed

    def compute_logits(self, cache: TransformersCache, tokens: list[int]) -> Tensor | None:
        """After one more token of each sequence, until the next one.

        None where an ordinary forward has to do it, which `passed` is told of.
        """
        self._pending_refusal, self._capture_failed = None, False
        refusal = self.refusal or FAILED_CAPTURES.get(self.model)
        if refusal is None:
            try:
                if self._num_warmups < self.backend.num_warmup_forwards:
                    self._record_warmup()
                    return None
                return self._replay_token(cache, tokens)
            except CapacityError:  # there is no room, or it does what a step does not
                return None
            except ReplayPaused as error:
                refusal = str(error)
            except UnsupportedView as error:
                refusal = self.refusal = str(error)
            except Exception as error:  # a model may do anything that a graph cannot hold
                refusal = self._pending_refusal = _format_error(error)
            if self.refusal or self._pending_refusal:
                self._reset_replay()
                self._last_cache_ref, self._last_buffers, self._keepalive, self._baked_values = (
                    None,
                    [],
                    [],
                    [],
                )
            log.info("tokens are not replayed: %s", refusal)
        cache.context.replay_stats.refusal = refusal
        return None

    def confirm_forward(self) -> None:
        """An ordinary forward took the token: what a replay died of was no fault of the token's."""
        if self._pending_refusal is not None:
            self.refusal = self._pending_refusal
            if self._capture_failed:  # the next cache need not try again
                FAILED_CAPTURES[self.model] = self._pending_refusal

    def _record_warmup(self) -> None:
        """An ordinary forward is to come first; from it on the model is to stay what it is."""
        if not self._num_warmups:
            self._save_baked_values(collect_baked_values(self.model))
        self._num_warmups += 1

    def _save_baked_values(self, values: list[object]) -> None:
        self._keepalive = [
            get_weight_memory(x) for x in chain(self.model.parameters(), self.model.buffers())
        ]
        self._baked_values = values

    def _reset_replay(
        self,
        page_tables: Sequence[StaticTritonPageTable | StandingPlace] = (),
        steps: Sequence[TritonDecodeStep | NativeStep] = (),
        forward: StaticForward | None = None,
    ) -> None:
        """Anew, with these steps, in one call: an interrupt finds all of the old or of the new."""
        fresh = {"_has_run": False, "_is_captured": False, "_forward": forward}
        self.__dict__.update(fresh, _page_tables=list(page_tables), _steps=list(steps))

    def _check_backend(self, requested: str | None) -> None:
        if self._steps and requested not in (None, self._steps[0].backend):
            raise ReplayPaused(
                f"backend={requested!r} is asked for, and {self._steps[0].backend} would do"
            )

    def _replay_token(self, cache: TransformersCache, tokens: list[int]) -> Tensor:
        layers, states = _list_attention_layers(cache), cache.states
        self._check_backend(states.backend)
        same = self._last_cache_ref is not None and self._last_cache_ref() is cache
        lie = states.page_buffers
        alike = same and cache.context.change_counts == self._last_change_counts
        alike = alike and all(
            map(is_, lie, self._last_buffers)
        )  # whoever shares the pages may need more
        alike = alike and self._last_modes == get_torch_modes()
        self._last_cache_ref = None  # until the token is there
        changes = states.expect(seals=self.backend.seals_pages)
        self._num_tokens += 1
        if not alike or self._num_tokens % MODEL_CHECK_INTERVAL == 0:
            self._check_model()
        if alike and self._steps and all(change.is_steady for change in changes):
            for place in self._page_tables:
                place.advance()
        else:
            lie = states.page_buffers
            self._update_pages(cache, layers, changes)
            self._check_backend(states.backend)
        self._ids.copy_(torch.tensor(tokens)[:, None])
        out = self._run_forward()
        if not states.arrive(self._steps[0].backend, lie):
            raise ReplayPaused("another cache moved the pages meanwhile")
        if self.backend.seals_pages and any(len(change.seals) for change in changes):
            for layer in layers:
                layer.paged_layer.record_sealed_pages(
                    changes[layer.paged_layer.group], self._steps[0].backend
                )
        for layer in layers:
            layer.record_replay()
        self._last_change_counts, self._last_buffers, self._last_modes = (
            cache.context.change_counts,
            lie,
            get_torch_modes(),
        )
        self._last_cache_ref = ref(cache)
        cache.context.replay_stats.num_tokens += self._is_captured
        cache.context.replay_stats.refusal = None
        return out

    def _check_model(self) -> None:
        """Is the model what it was? Else begin anew."""
        if (reason := explain_unreplayable(self.model)) is not None:
            raise ReplayPaused(reason)
        if (now := collect_baked_values(self.model)) != self._baked_values:
            known = self._baked_values
            self._reset_replay()
            self._save_baked_values(now)
            if known and self.backend.num_warmup_forwards:
                self._num_warmups = 0
                raise ReplayPaused("something about the model has changed")

    def _update_pages(
        self, cache: TransformersCache, layers: list[AttentionLayer], plans: list[AppendPlan]
    ) -> None:
        """Go on where pages lie now; where memory is another, begin anew."""
        pages = [layer.paged_layer.make_view(plans[layer.paged_layer.group]) for layer in layers]
        moved = len(self._steps) != len(pages) or len(self._page_tables) != len(plans)
        moved = moved or any(
            not step.rebind(one) for step, one in zip(self._steps, pages, strict=True)
        )
        moved = moved or any(  # one of them ends the graph of all
            not place.update(change) for place, change in zip(self._page_tables, plans, strict=True)
        )
        if not moved:
            return
        self._reset_replay()
        device = self.model.device
        places = [self.backend.page_table_type(change, device) for change in plans]
        with no_inference_mode():
            self._ids = torch.zeros(plans[0].old_table.batch, 1, dtype=torch.int64, device=device)
        both = zip(pages, (places[layer.paged_layer.group] for layer in layers), strict=True)
        steps = [self.backend.step_type.from_view(*given) for given in both]  # type: ignore[arg-type]
        self._reset_replay(places, steps, self._make_forward(ReplayCache(cache.layers, steps)))

    def _make_forward(self, cache: ReplayCache) -> StaticForward:
        def forward(ids: Tensor, lengths: Tensor) -> Tensor:
            with (
                use_kvant_attention(self.model)
                if self.backend.enables_kvant_attention
                else nullcontext()
            ):
                return self.model_forward(ids, lengths[:, None] - 1, cache)

        return forward

    def _run_forward(self) -> Tensor:
        """On a GPU the first time as it is: kernels are compiled, what is made once is made."""
        assert self._forward is not None
        given = self._ids, self._page_tables[0].lengths
        if not self._is_captured and (self._has_run or not self.backend.runs_eagerly_first):
            try:
                now = self.capture(self._forward, *given)
            except (torch.OutOfMemoryError, UnsupportedView):
                raise
            except Exception:
                self._capture_failed = True
                raise
            self.__dict__.update(_forward=now, _is_captured=True)  # in one call, as in _begin
            if isinstance(now, Replay):
                return now.out
        self._has_run = True
        return self._forward(*given)


def _format_error(error: Exception) -> str:
    """In one line: some print whole programs."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _list_attention_layers(cache: TransformersCache) -> list[AttentionLayer]:
    """The layers that take rows; some of a model's may remember nothing."""
    layers = [layer for layer in cache.layers if not isinstance(layer, DummyLayer)]
    for layer in layers:
        if type(layer) is not AttentionLayer or layer.pending_type is not PendingAttention:
            kind = "latents" if isinstance(layer, AttentionLayer) else type(layer).__name__
            raise UnsupportedView(f"layers of {kind} take no steps")
    return layers
