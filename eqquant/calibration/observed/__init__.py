"""A weight that records statistics of its inputs."""

from ._array import MODELS, Observed, ObservedArray, symmetric, Uses
