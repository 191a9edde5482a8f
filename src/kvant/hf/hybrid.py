"""A layer of the model that attends and recurs: attention is ours, the recurrence the host's."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvant.hf.layers import AttentionLayer
from kvant.hf.recurrence import Recurrence


class HybridLayer(AttentionLayer, LinearAttentionCacheLayerMixin):
    """Attention beside a recurrence that a layer of the host's own keeps."""

    supports_early_init = False

    @property
    def beside(self) -> Any:
        """The host's layer."""
        state: Recurrence = self.context.states[self.index]["recurrence"]
        return state.layer

    @property
    def conv_states(self) -> Any:
        return self.beside.conv_states

    @property
    def recurrent_states(self) -> Any:
        return self.beside.recurrent_states

    @property
    def has_previous_state(self) -> Any:
        return self.beside.has_previous_state

    @property
    def record_past(self) -> Any:
        return self.beside.record_past

    @property
    def is_croppable(self) -> Any:  # type: ignore[override]
        return self.beside.is_croppable

    def activate_past_recording(self) -> None:
        self.beside.activate_past_recording()

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.beside.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self.beside.update_recurrent_state(*args, **kwargs)
