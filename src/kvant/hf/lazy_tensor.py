"""Tensors without storage: they know their shape, and an operation that touches them makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyTensor(torch.Tensor):
    """A tensor that is made on its first use by an operation that nobody answers for it."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    _dense: Tensor | None
    _shape: torch.Size

    # Asked for by every layer of a host, and answered without its detours, or a call in Python.
    shape = property(attrgetter("_shape"))

    @classmethod
    def make_empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """An instance without attributes: the caller gives it those that `make` needs."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._dense, made._shape = None, torch.Size(shape)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        real = tree_map_only(
            LazyTensor, lambda lazy: lazy.materialize(name), (tuple(args), dict(kwargs or {}))
        )
        return func(*real[0], **real[1])

    @property
    def is_materialized(self) -> bool:
        """Is there a real tensor? Then it may have been written to, and it alone is true."""
        return self._dense is not None

    def materialize(self, reason: str) -> Tensor:
        """The tensor itself; `why` names who needs it."""
        if self._dense is None:
            self._dense = self.compute_dense(reason)
        return self._dense

    def compute_dense(self, reason: str) -> Tensor:
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"


def materialize_tensor(tensor: Tensor | None, reason: str) -> Tensor | None:
    """A tensor that any code may take."""
    return tensor.materialize(reason) if isinstance(tensor, LazyTensor) else tensor
