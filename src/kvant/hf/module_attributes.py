"""Read and restore the plain attributes of a model's modules, fast enough for every request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

PLAIN_TYPES = (bool, int, float, str)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # attributes of every module


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules as `nn.Module.named_modules` does, but faster."""
    modules, visited = [], set[int]()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        modules.append((name, module))
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        stack += [(f"{name}.{key}" if name else key, child) for key, child in reversed(children)]
    return modules


def named_attributes(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the names and values of the attributes of all modules."""
    attributes = (item for _, module in named_modules(model) for item in vars(module).items())
    return [(name, value) for name, value in attributes if name not in MODULE_ATTRIBUTES]


@contextmanager
def restore_modules(model: nn.Module) -> Iterator[None]:
    """Restore the attributes and buffers of all modules at the end, training mode included.

    Changes in place are not undone: values of a tensor, of a list or of a dictionary.
    """
    modules = [module for _, module in named_modules(model)]
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            for name in vars(module).keys() - attributes:
                del module.__dict__[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def make_comparable(value: Any) -> object:
    """Return the plain parts of a value as an immutable object; None if it has none."""
    if isinstance(value, PLAIN_TYPES):
        return value
    if isinstance(value, Mapping):
        return tuple((key, item) for key, item in value.items() if isinstance(item, PLAIN_TYPES))
    if isinstance(value, list | tuple):
        return tuple(item for item in value if isinstance(item, PLAIN_TYPES))
    if isinstance(value, set | frozenset):
        return tuple(sorted((item for item in value if isinstance(item, PLAIN_TYPES)), key=repr))
    return None
