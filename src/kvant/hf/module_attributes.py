"""What the modules of a model hold beside parameters: asked at every request, so in one walk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

PLAIN_TYPES = (bool, int, float, str)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # what PyTorch keeps of any module


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each of them once, as `nn.Module.named_modules` has them, but sooner."""
    found, seen = [], set[int]()
    rest = [("", model)]
    while rest:
        name, module = rest.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append((name, module))
        parts = [(part, one) for part, one in module._modules.items() if one is not None]
        rest += [(f"{name}.{part}" if name else part, one) for part, one in reversed(parts)]
    return found


def named_attributes(model: nn.Module) -> list[tuple[str, Any]]:
    """The plain attributes of its modules, by name."""
    every = (item for _, module in named_modules(model) for item in vars(module).items())
    return [(name, value) for name, value in every if name not in MODULE_ATTRIBUTES]


@contextmanager
def restore_modules(model: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of all modules at the end, training mode included.

    What is changed in place stays so: values of a tensor, of a list or of a dictionary.
    """
    modules = [module for _, module in named_modules(model)]
    before = [(one, dict(vars(one)), dict(one._buffers)) for one in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            for name in vars(module).keys() - attributes:
                del module.__dict__[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def make_comparable(value: Any) -> object:
    """Something equal for equal values; None for what is no plain value."""
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, Mapping):
        return tuple((key, item) for key, item in value.items() if isinstance(item, PLAIN_TYPES))
    if isinstance(value, list | tuple):
        return tuple(item for item in value if isinstance(item, PLAIN_TYPES))
    if isinstance(value, set | frozenset):
        return tuple(sorted((item for item in value if isinstance(item, PLAIN_TYPES)), key=repr))
    return None
