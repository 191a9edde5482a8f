"""kvant: the KV cache of a language model as a component of its own.

Names are imported when they are first used: `import kvant` alone imports neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from kvant.lazy import lazy_names

if TYPE_CHECKING:
    from torch import device as Device
    from torch.nn import Module

    from kvant import functional, types
    from kvant.attention import attend
    from kvant.cache import Cache, merge
    from kvant.cache.files import save
    from kvant.cache.sequences import Sequences
    from kvant.contracts import Mask
    from kvant.engine import Engine, Result, Stream, Usage, generate_many
    from kvant.errors import (
        CacheError,
        CacheFileError,
        CapacityError,
        ContextError,
        EngineError,
        ExtensionError,
        GrammarError,
        PromptError,
        RewindError,
        SnapshotMismatch,
        SpecError,
        UnknownSequence,
        UnsupportedView,
    )
    from kvant.eval.recommend import Recommendation, recommend
    from kvant.generation import Grammar, Messages, Session, Step, generate
    from kvant.hf import TransformersCache, cache_for, detach
    from kvant.models.shapes import Shape
    from kvant.planner import Plan, plan
    from kvant.prefixes import Prefixes
    from kvant.probing import Probe, TunedSpec, attach, probe, tune
    from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec
    from kvant.spec import parse
    from kvant.spec.tables import register_codec, register_retention, register_score
    from kvant.stores import register_store
    from kvant.weights.packing import Packing, pack, unpack

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "CacheError",
    "CacheFileError",
    "CacheSpec",
    "CapacityError",
    "ContextError",
    "EmptySpec",
    "Engine",
    "EngineError",
    "ExtensionError",
    "Grammar",
    "GrammarError",
    "GroupSpec",
    "LayerSpec",
    "Mask",
    "Messages",
    "Packing",
    "Plan",
    "Prefixes",
    "Probe",
    "PromptError",
    "Recommendation",
    "RecurrentSpec",
    "Result",
    "RewindError",
    "Sequences",
    "Session",
    "Shape",
    "SharedSpec",
    "SnapshotMismatch",
    "SpecError",
    "Step",
    "Stream",
    "TunedSpec",
    "UnknownSequence",
    "UnsupportedView",
    "Usage",
    "attach",
    "attend",
    "cache_for",
    "detach",
    "explain",
    "functional",
    "generate",
    "generate_many",
    "load",
    "merge",
    "pack",
    "parse",
    "plan",
    "probe",
    "recommend",
    "register_codec",
    "register_retention",
    "register_score",
    "register_store",
    "save",
    "tune",
    "types",
    "unpack",
]


NAMES_BY_MODULE = {  # the public names that are imported on first use
    "kvant.attention": "attend",
    "kvant.cache": "Cache merge",
    "kvant.cache.files": "save",
    "kvant.cache.sequences": "Sequences",
    "kvant.contracts": "Mask",
    "kvant.engine": "Engine Result Stream Usage generate_many",
    "kvant.eval.recommend": "Recommendation recommend",
    "kvant.errors": (
        "CacheError CacheFileError CapacityError ContextError EngineError ExtensionError "
        "GrammarError PromptError RewindError SnapshotMismatch SpecError UnknownSequence "
        "UnsupportedView"
    ),
    "kvant.generation": "Grammar Messages Session Step generate",
    "kvant.hf": "cache_for detach",
    "kvant.models.shapes": "Shape",
    "kvant.planner": "Plan plan",
    "kvant.prefixes": "Prefixes",
    "kvant.probing": "Probe TunedSpec attach probe tune",
    "kvant.recipes": "CacheSpec EmptySpec GroupSpec LayerSpec RecurrentSpec SharedSpec",
    "kvant.spec": "parse",
    "kvant.spec.tables": "register_codec register_retention register_score",
    "kvant.stores": "register_store",
    "kvant.weights.packing": "Packing pack unpack",
}


@overload
def load(path: str | PathLike[str], *, device: str | Device = "cpu") -> Cache: ...
@overload
def load(
    path: str | PathLike[str], model: Module, *, device: str | Device | None = None
) -> TransformersCache: ...
def load(
    path: str | PathLike[str],
    model: Any = None,
    *,
    device: str | Device | None = None,
) -> Any:
    """Load a cache from a file; with a model, as the cache that `cache_for` returns.

    >>> rows = torch.randn(1, 2, 10, 64)
    >>> cache = kvant.Cache(num_layers=1)
    >>> view = cache[0].append(rows, rows)
    >>> kvant.save(cache, "cache.kv")
    >>> kvant.load("cache.kv").length
    10
    """
    if model is None:
        from kvant.cache import files

        return files.load(path, device=device or "cpu")
    from kvant.hf import load_cache

    return load_cache(path, model, device)


def explain(what: Any) -> Any:
    """Explain which backend reads a view, a cache, a session or a model, and why others do not.

    A cache is explained layer by layer, a session by its cache, and a model by the cache that it
    is attached with, or by a raw one.

    >>> view = kvant.Cache(1, backend="reference")[0].append(*torch.randn(2, 1, 2, 10, 64))
    >>> print(kvant.explain(view))
    reference: reads this view
    >>> print(kvant.explain(model))
    layers 0-5, full_attention: raw; not read yet
    """
    from torch.nn import Module

    from kvant.attention import explain

    if isinstance(what, Module):
        from kvant.hf import explain_model

        return explain_model(what)
    return explain(what)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # a type checker would accept any name
    _import_name = lazy_names(__name__, NAMES_BY_MODULE)

    def __getattr__(name: str) -> Any:
        """Import a name of NAMES_BY_MODULE, or a module of the package."""
        is_module = name not in __all__ or name in ("functional", "types")
        # A dot would import a parent.
        if is_module and name.isidentifier() and find_spec(f"kvant.{name}") is not None:
            return import_module(f"kvant.{name}")
        globals()[name] = value = _import_name(name)  # later uses skip this function
        return value
