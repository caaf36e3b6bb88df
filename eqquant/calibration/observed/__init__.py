"""A weight that records statistics of its inputs."""

from ._array import Observed, ObservedArray, symmetric, Uses
