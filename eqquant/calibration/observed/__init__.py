"""A weight that records statistics of its inputs."""

from ._array import (
    Observed as Observed,
    ObservedArray as ObservedArray,
    symmetric as symmetric,
    Uses as Uses,
)
