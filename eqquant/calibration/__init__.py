"""Calibration: input statistics of weights, and rounding that uses them.

Exports `calibrate` and the statistics that it returns; `allocate`; and
`fold_rotations`. Imports `trees`, `arrays`, `primitives`, `partition`, `kernels`,
`formats` and `_jax`.
"""

from ._allocate import allocate, Allocation
from ._calibrate import calibrate
from ._fold_rotations import fold_rotations, FoldedRotations
from ._statistics import Statistics, WeightStatistics


__all__ = [
    "allocate",
    "Allocation",
    "calibrate",
    "fold_rotations",
    "FoldedRotations",
    "Statistics",
    "WeightStatistics",
]
