"""The library's own loop: streaming generation over a cache of any format."""

from kvant.generation.api import generate
from kvant.generation.decoder import HostDecoder
from kvant.generation.sampling import Sampling
from kvant.generation.session import Session
from kvant.generation.stream import Step

__all__ = ["HostDecoder", "Sampling", "Session", "Step", "generate"]
