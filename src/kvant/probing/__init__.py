"""What a spec does to a model, before it answers with it."""

from kvant.probing.finding import (
    Probe,
    auto_size,
    auto_tolerance,
    check_spec,
    is_auto,
    probe,
    resolved,
)
from kvant.probing.guard import attach, attached, harm
from kvant.probing.judgement import MAX_KL, MAX_LOST, Tolerance, trial
from kvant.probing.predictions import Divergence, divergence

__all__ = [
    "MAX_KL",
    "MAX_LOST",
    "Divergence",
    "Probe",
    "Tolerance",
    "attach",
    "attached",
    "auto_size",
    "auto_tolerance",
    "check_spec",
    "divergence",
    "harm",
    "is_auto",
    "probe",
    "resolved",
    "trial",
]
