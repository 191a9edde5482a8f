"""What a spec does to a model, before it answers with it."""

from kvant.probing.finding import Probe, auto_size, is_auto, probe, resolved
from kvant.probing.guard import attach, attached, harm
from kvant.probing.predictions import Damage, damage
from kvant.probing.text import MAX_KL, trial

__all__ = [
    "MAX_KL",
    "Damage",
    "Probe",
    "attach",
    "attached",
    "auto_size",
    "damage",
    "harm",
    "is_auto",
    "probe",
    "resolved",
    "trial",
]
