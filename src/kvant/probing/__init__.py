"""Measure what a spec does to a model, before the model is used with it."""

from kvant.probing.divergence import Divergence, measure_divergence
from kvant.probing.guard import attach, attach_checked, explain_harm
from kvant.probing.recommendation import Probe, probe, resolve_auto
from kvant.probing.trials import make_trial
from kvant.probing.tuning import TunedSpec, tune

__all__ = [
    "Divergence",
    "Probe",
    "TunedSpec",
    "attach",
    "attach_checked",
    "explain_harm",
    "make_trial",
    "measure_divergence",
    "probe",
    "resolve_auto",
    "tune",
]
