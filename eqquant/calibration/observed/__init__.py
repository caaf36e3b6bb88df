"""A weight that records statistics of its inputs."""

from ._array import ObservedArray as ObservedArray
from ._structure import Observed as Observed
