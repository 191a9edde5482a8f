"""What a spec does to a model, before it answers with it."""

from kvant.probing.finding import Probe, probe, resolved
from kvant.probing.guard import attach, attached, harm
from kvant.probing.judgement import trial
from kvant.probing.predictions import Divergence, divergence

__all__ = [
    "Divergence",
    "Probe",
    "attach",
    "attached",
    "divergence",
    "harm",
    "probe",
    "resolved",
    "trial",
]
