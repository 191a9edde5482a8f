"""kvant in the hands of Hugging Face transformers."""

from kvant.attention import explain
from kvant.hf.attach import attach, attachments, detach, explain_model
from kvant.hf.build import PairedCache, cache_for, loaded
from kvant.hf.cache import HostCache
from kvant.hf.detect import continues, crosses
from kvant.hf.forward import TokenForward
from kvant.hf.inside import (
    cache_name,
    check_continues,
    continuing,
    host_model,
    identity,
    reader,
    unwrapped,
)
from kvant.hf.modules import held, named_modules, plain
from kvant.hf.replaying import NATIVELY, Capture, Replayer, captured, capturing
from kvant.hf.support import Level, Support, support_of

explain.register(HostCache, HostCache.explain)
explain.register(PairedCache, PairedCache.explain)

__all__ = [
    "NATIVELY",
    "Capture",
    "HostCache",
    "Level",
    "PairedCache",
    "Replayer",
    "Support",
    "TokenForward",
    "attach",
    "attachments",
    "cache_for",
    "cache_name",
    "captured",
    "capturing",
    "check_continues",
    "continues",
    "continuing",
    "crosses",
    "detach",
    "explain_model",
    "held",
    "host_model",
    "identity",
    "loaded",
    "named_modules",
    "plain",
    "reader",
    "support_of",
    "unwrapped",
]
