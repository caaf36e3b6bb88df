"""eqquant without its native kernels."""

from . import Peer
from .eqquant import load


peer = Peer("eqquant, XLA", load, environment={"EQQUANT_CPU": "off"})
