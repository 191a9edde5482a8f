"""Define tensors without storage, whose values are computed when an operation needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class LazyTensor(torch.Tensor):
    """A tensor whose values are computed by the first operation that its class does not handle."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    _dense: Tensor | None
    _shape: torch.Size

    # Every layer reads the shape: `attrgetter` avoids the PyTorch dispatcher and a Python call.
    shape = property(attrgetter("_shape"))

    @classmethod
    def make_empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """Return an instance; the caller sets the attributes that `compute_dense` needs."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._dense, tensor._shape = None, torch.Size(shape)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func)
        dense_args, dense_kwargs = tree_map_only(
            LazyTensor, lambda lazy: lazy.materialize(name), (tuple(args), dict(kwargs or {}))
        )
        return func(*dense_args, **dense_kwargs)

    @property
    def is_materialized(self) -> bool:
        """Whether the dense tensor exists; callers may have written to it, so read nothing else."""
        return self._dense is not None

    def materialize(self, reason: str) -> Tensor:
        """Return the dense tensor; `reason` names the operation that needs it."""
        if self._dense is None:
            self._dense = self.compute_dense(reason)
        return self._dense

    def compute_dense(self, reason: str) -> Tensor:
        """Compute the dense tensor."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"


def materialize_tensor(tensor: Tensor | None, reason: str) -> Tensor | None:
    """Return a plain tensor, materialized if it is lazy."""
    return tensor.materialize(reason) if isinstance(tensor, LazyTensor) else tensor
