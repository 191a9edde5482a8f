"""Decode tokens by a forward that is captured once and then replayed.

On a GPU the forward is captured as a CUDA graph, on a CPU by capture.py.

    cache.expect()  ->  replay: q, k, v; store the row; attend  ->  cache.arrive()
    allocates the slot of the row                                   commits the token

After every token the cache is as ordinary forwards would have left it. Pages that fall due are
sealed by `expect`, or on a CPU by the replay. A graph is valid while tensors keep their addresses,
which a capacity guarantees. If a forward cannot be captured, `refusal` has the reason, and ordinary
forwards decode instead.

A Replayer keeps the memory that a graph reads, but not the cache. It notices changes of the model
within MODEL_CHECK_INTERVAL tokens, or when another cache is decoded.
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
from kvant.attention.native.decode_step import NativeDecodeStep, StaticNativePageTable
from kvant.attention.triton.arguments import StaticTritonPageTable
from kvant.capture import Replay
from kvant.contracts import Mask, View
from kvant.errors import CacheError, CapacityError, UnsupportedView
from kvant.hf.attention import use_kvant_attention
from kvant.hf.cache import TransformersCache
from kvant.hf.cache_context import AttentionStats
from kvant.hf.handles import make_handles
from kvant.hf.layers import AttentionLayer
from kvant.hf.model_layers import is_window_narrowed
from kvant.hf.module_attributes import make_comparable, named_attributes
from kvant.hf.pending_attention import AttentionCall, PendingAttention, SideName
from kvant.norms import is_fused
from kvant.page_table import AppendPlan
from kvant.torch_modes import no_inference_mode
from kvant.weights import get_weight_address, get_weight_memory

DecodeStep = TritonDecodeStep | NativeDecodeStep
StaticPageTable = StaticTritonPageTable | StaticNativePageTable


@dataclass(eq=False, kw_only=True)
class PendingReplayAttention(PendingAttention):
    """The rows of one layer; attention first stores the row of the new token."""

    step: DecodeStep
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
    """One attention layer of a replayed forward; `step` stores its rows and attends."""

    def __init__(self, layer: AttentionLayer, step: DecodeStep) -> None:
        self.step = step
        self.is_sliding = layer.is_sliding
        self.is_window_narrowed = is_window_narrowed(layer.layer_info, layer.recipe)
        self.window, self.model_has_gqa = layer.layer_info.window, layer.layer_info.model_has_gqa
        super().__init__()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the layer has its tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        source = PendingReplayAttention(
            self.step.view,
            1,
            self.get_mask_sizes(1)[0],
            key_states.dtype,
            AttentionStats(),
            self.is_window_narrowed,
            model_has_gqa=self.model_has_gqa,
            step=self.step,
            new_rows=(key_states, value_states),
        )
        return make_handles(source, key_states.dtype, key_states.device)

    def get_seq_length(self) -> Tensor:
        """Return the number of columns before this token, as a tensor."""
        return self.step.page_table.columns - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return an upper bound on columns; a mask tensor of that size is refused later."""
        capacity = self.step.page_table.capacity
        return capacity if self.window is None else min(capacity, self.window), 0

    def get_max_length(self) -> int:
        return -1

    def reset(self, *args: Any) -> NoReturn:
        raise CacheError("a captured forward may only append one token to its cache")

    crop = reorder_cache = batch_select_indices = batch_repeat_interleave = reset


class ReplayCache(HFCache):
    """The cache of a replayed forward: ReplayLayers, and the layers without rows."""

    def __init__(self, layers: Sequence[Any], steps: Sequence[DecodeStep]) -> None:
        remaining = iter(steps)
        super().__init__(
            layers=[
                ReplayLayer(layer, next(remaining)) if isinstance(layer, AttentionLayer) else layer
                for layer in layers
            ]
        )

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        first = next(layer for layer in self.layers if isinstance(layer, ReplayLayer))
        return first.get_seq_length()


class ReplayBackend(NamedTuple):
    """The classes and rules of replay on one type of device."""

    page_table_type: type[StaticTritonPageTable] | type[StaticNativePageTable]
    step_type: type[TritonDecodeStep] | type[NativeDecodeStep]
    num_warmup_forwards: int  # ordinary forwards first, since a capture costs several of them
    runs_eagerly_first: bool  # run the first forward of steps without a capture
    seals_pages: bool  # a step also copies and seals the pages that fall due
    enables_kvant_attention: bool  # a model that is not attached needs kvant's attention


TRITON_REPLAY = ReplayBackend(
    StaticTritonPageTable,
    TritonDecodeStep,
    num_warmup_forwards=0,
    runs_eagerly_first=True,
    seals_pages=False,
    enables_kvant_attention=True,
)
NATIVE_REPLAY = ReplayBackend(
    StaticNativePageTable,
    NativeDecodeStep,
    num_warmup_forwards=4,
    runs_eagerly_first=False,
    seals_pages=True,
    enables_kvant_attention=False,
)
StaticForward = Callable[[Tensor, Tensor], Tensor]  # (ids, lengths), at fixed addresses
CaptureFunction = Callable[[StaticForward, Tensor, Tensor], StaticForward]


def capture_graph(forward: StaticForward, ids: Tensor, lengths: Tensor) -> StaticForward:
    """Capture a forward as a CUDA graph; its replay ignores arguments and reuses its output.

    An operation that cannot be captured, such as a synchronization, raises an error.
    """
    _check_no_synchronization(forward, ids, lengths)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(ids.device)
    with (
        torch.cuda.device(ids.device),
        torch.cuda.stream(stream),  # restored even if the capture fails
        torch.cuda.graph(
            graph,
            # The default is a stream of the device that captured first.
            stream=torch.cuda.Stream(ids.device),  # type: ignore[no-untyped-call]
            capture_error_mode="thread_local",  # do not restrict other threads
        ),
    ):
        out = forward(ids, lengths)

    def replay(*inputs: Tensor) -> Tensor:
        graph.replay()
        return out

    return replay


def _check_no_synchronization(forward: StaticForward, ids: Tensor, lengths: Tensor) -> None:
    """Raise an error if the forward synchronizes: inside a capture it could not be undone."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward(ids, lengths)
    finally:
        torch.cuda.set_sync_debug_mode(previous_mode)


def make_capture_function(
    capture: CaptureFunction, config: CompileConfig | None
) -> CaptureFunction:
    """Return `capture`, preceded by torch.compile if there is a configuration for it."""
    return capture if config is None else partial(_compile_and_capture, capture, config)


def _compile_and_capture(
    capture: CaptureFunction,
    config: CompileConfig,
    forward: StaticForward,
    ids: Tensor,
    lengths: Tensor,
) -> StaticForward:
    from torch.fx.experimental.proxy_tensor import make_fx

    # The compiler does not understand handles, but the operators that they call.
    graph = make_fx(forward, _error_on_data_dependent_ops=True)(ids, lengths)
    options = {"backend": config.backend, "options": config.options}
    compiled = torch.compile(graph, fullgraph=True, dynamic=False, **options)
    compiled(ids, lengths)  # compile now: compilation cannot be captured
    return capture(compiled, ids, lengths)


def explain_unreplayable(model: PreTrainedModel) -> str | None:
    """Return the reason why a replay would differ from the model, None if it would not."""
    if model.training:
        return "the model is in training mode"
    if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
        return f"the model lies on {', '.join(sorted(devices))}"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast caches converted weights, which a replay would read for ever"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "_hf_hook" in vars(module):
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
MODEL_CHECK_INTERVAL = 64  # tokens; a check of all modules takes as long as some layers
FAILED_CAPTURES: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # and the reason
# (ids [B, 1], positions [B, 1], cache) -> logits
ModelForward = Callable[[Tensor, Tensor, Any], Tensor]


class ReplayPaused(Exception):
    """A temporary reason not to replay, which may be gone at the next token."""


class Replayer:
    """Replayed forwards of one model over one set of pools.

    The capture is reused for other caches with the same number of sequences in the same pools.
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
        # The error of a replay; it becomes the refusal once an ordinary forward succeeds.
        self._pending_refusal: str | None = None
        self._capture_failed = False  # that error came from the capture
        self._ids = torch.zeros(0, 1, dtype=torch.int64)
        self._baked_values: list[object] = []  # of the model
        self._keepalive: list[Any] = []  # memory of the weights, which the graph reads
        self._page_tables: list[StaticPageTable] = []  # by layer group
        self._steps: list[DecodeStep] = []  # by attention layer
        self._forward: StaticForward | None = None  # over these steps; after a capture its replay
        self._has_run = self._is_captured = False
        self._num_tokens = 0
        self._num_warmups = 0  # ordinary forwards so far
        # After the newest token: its cache, and that cache's changes and buffers, and the modes.
        self._last_cache_ref: ref[TransformersCache] | None = None
        self._last_change_counts = (-1, -1)
        self._last_buffers: list[Any] = []
        self._last_modes = get_torch_modes()

    def compute_logits(self, cache: TransformersCache, tokens: list[int]) -> Tensor | None:
        """Replay one token of each sequence, and return logits that are valid until the next.

        None: run an ordinary forward instead, then call `confirm_forward`.
        """
        self._pending_refusal, self._capture_failed = None, False
        refusal = self.refusal or FAILED_CAPTURES.get(self.model)
        if refusal is None:
            try:
                if self._num_warmups < self.backend.num_warmup_forwards:
                    self._record_warmup()
                    return None
                return self._replay_token(cache, tokens)
            except CapacityError:  # the cache is full, or the token needs an ordinary append
                return None
            except ReplayPaused as error:
                refusal = str(error)
            except UnsupportedView as error:
                refusal = self.refusal = str(error)
            except Exception as error:  # models fail to be captured in any way
                refusal = self._pending_refusal = _format_error(error)
            if self.refusal or self._pending_refusal:
                self._reset_replay()
                self._last_cache_ref = None
                self._last_buffers, self._keepalive, self._baked_values = [], [], []
            log.info("tokens are not replayed: %s", refusal)
        cache.context.replay_stats.refusal = refusal
        return None

    def confirm_forward(self) -> None:
        """Make the error of a replay final: an ordinary forward succeeded on the same token."""
        if self._pending_refusal is not None:
            self.refusal = self._pending_refusal
            if self._capture_failed:  # do not try again for other caches
                FAILED_CAPTURES[self.model] = self._pending_refusal

    def _record_warmup(self) -> None:
        """Count an ordinary forward; from the first one on, the model must not change."""
        if not self._num_warmups:
            self._save_baked_values(collect_baked_values(self.model))
        self._num_warmups += 1

    def _save_baked_values(self, values: list[object]) -> None:
        """Keep the baked values, and the memory of the weights."""
        self._keepalive = [
            get_weight_memory(x) for x in chain(self.model.parameters(), self.model.buffers())
        ]
        self._baked_values = values

    def _reset_replay(
        self,
        page_tables: Sequence[StaticPageTable] = (),
        steps: Sequence[DecodeStep] = (),
        forward: StaticForward | None = None,
    ) -> None:
        """Replace the capture in one call, so that an interrupt leaves the old or the new one."""
        flags = {"_has_run": False, "_is_captured": False, "_forward": forward}
        self.__dict__.update(flags, _page_tables=list(page_tables), _steps=list(steps))

    def _check_backend(self, requested: str | None) -> None:
        if self._steps and requested not in (None, self._steps[0].backend):
            raise ReplayPaused(
                f"backend={requested!r} is requested, but the replay uses {self._steps[0].backend}"
            )

    def _replay_token(self, cache: TransformersCache, tokens: list[int]) -> Tensor:
        layers, states = _list_attention_layers(cache), cache.states
        self._check_backend(states.backend)
        is_same_cache = self._last_cache_ref is not None and self._last_cache_ref() is cache
        buffers = states.page_buffers
        unchanged = is_same_cache and cache.context.change_counts == self._last_change_counts
        # Another cache of the same pool may have reallocated its buffers.
        unchanged = unchanged and all(map(is_, buffers, self._last_buffers))
        unchanged = unchanged and self._last_modes == get_torch_modes()
        self._last_cache_ref = None  # until the token has arrived
        plans = states.plan_token(seals=self.backend.seals_pages)
        self._num_tokens += 1
        if not unchanged or self._num_tokens % MODEL_CHECK_INTERVAL == 0:
            self._check_model()
        if unchanged and self._steps and all(plan.is_steady for plan in plans):
            for page_table in self._page_tables:
                page_table.advance()
        else:
            buffers = states.page_buffers
            self._update_pages(cache, layers, plans)
            self._check_backend(states.backend)
        self._ids.copy_(torch.tensor(tokens)[:, None])
        out = self._run_forward()
        if not states.commit_token(self._steps[0].backend, buffers):
            raise ReplayPaused("another cache reallocated the pages during the replay")
        if self.backend.seals_pages and any(len(plan.seals) for plan in plans):
            for layer in layers:
                layer.paged_layer.record_sealed_pages(
                    plans[layer.paged_layer.group], self._steps[0].backend
                )
        for layer in layers:
            layer.record_replay()
        self._last_change_counts, self._last_buffers, self._last_modes = (
            cache.context.change_counts,
            buffers,
            get_torch_modes(),
        )
        self._last_cache_ref = ref(cache)
        cache.context.replay_stats.num_tokens += self._is_captured
        cache.context.replay_stats.refusal = None
        return out

    def _check_model(self) -> None:
        """Drop the capture if the model has changed since."""
        if (reason := explain_unreplayable(self.model)) is not None:
            raise ReplayPaused(reason)
        if (current := collect_baked_values(self.model)) != self._baked_values:
            previous = self._baked_values
            self._reset_replay()
            self._save_baked_values(current)
            if previous and self.backend.num_warmup_forwards:
                self._num_warmups = 0
                raise ReplayPaused("the model has changed")

    def _update_pages(
        self, cache: TransformersCache, layers: list[AttentionLayer], plans: list[AppendPlan]
    ) -> None:
        """Bind the steps to the current pages; if tensors moved, drop the capture."""
        views = [layer.paged_layer.make_view(plans[layer.paged_layer.group]) for layer in layers]
        moved = len(self._steps) != len(views) or len(self._page_tables) != len(plans)
        moved = moved or any(
            not step.rebind(view) for step, view in zip(self._steps, views, strict=True)
        )
        moved = moved or any(  # one moved table invalidates the whole capture
            not table.update(plan) for table, plan in zip(self._page_tables, plans, strict=True)
        )
        if not moved:
            return
        self._reset_replay()
        device = self.model.device
        tables = [self.backend.page_table_type(plan, device) for plan in plans]
        with no_inference_mode():
            self._ids = torch.zeros(plans[0].old_table.batch, 1, dtype=torch.int64, device=device)
        pairs = zip(views, (tables[layer.paged_layer.group] for layer in layers), strict=True)
        steps = [self.backend.step_type.from_view(*pair) for pair in pairs]  # type: ignore[arg-type]
        self._reset_replay(tables, steps, self._make_forward(ReplayCache(cache.layers, steps)))

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
        """Run the forward; on a GPU first without a capture, so that kernels are compiled."""
        assert self._forward is not None
        arguments = self._ids, self._page_tables[0].lengths
        if not self._is_captured and (self._has_run or not self.backend.runs_eagerly_first):
            try:
                captured = self.capture(self._forward, *arguments)
            except (torch.OutOfMemoryError, UnsupportedView):
                raise
            except Exception:
                self._capture_failed = True
                raise
            # In one call, as in _reset_replay.
            self.__dict__.update(_forward=captured, _is_captured=True)
            if isinstance(captured, Replay):
                return captured.out
        self._has_run = True
        return self._forward(*arguments)


def _format_error(error: Exception) -> str:
    """Format an error as one line; some messages contain whole programs."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _list_attention_layers(cache: TransformersCache) -> list[AttentionLayer]:
    """Return the attention layers of a cache; refuse layers that a replay cannot serve."""
    layers = [layer for layer in cache.layers if not isinstance(layer, DummyLayer)]
    for layer in layers:
        if type(layer) is not AttentionLayer:
            raise UnsupportedView(f"layers of {type(layer).__name__} cannot be replayed")
        if layer.pending_type is not PendingAttention:
            raise UnsupportedView("layers of latents cannot be replayed")
    return layers
