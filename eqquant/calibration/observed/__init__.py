"""A weight that records statistics of its inputs."""

from ._array import Observed as Observed, ObservedArray as ObservedArray, Uses as Uses
