"""Whole pytrees: selection of weights, quantization and reports.

Exports `quantize_tree`, `dequantize_tree`, `with_compute`, the report, and the choice
of weights, which training shares. Imports `dispatch`, `arrays`, `kernels`, `formats`
and `_jax`.
"""

from ._average_trees import average_trees
from ._cache import quantize_cache
from ._calibration import AbstractCalibration, Rounder
from ._cast_tree import cast_tree
from ._choice import (
    base_of,
    Choice,
    choose,
    choose_among,
    map_weights,
    replace_base,
    replace_chosen,
)
from ._conventions import Axis, register_weights, WeightAxes
from ._errors import errors_at
from ._forward import check_forward, each_batch
from ._layers import match_layers
from ._left_out import warn_of_left_out
from ._nbytes import nbytes
from ._progress import with_progress
from ._quantize import dequantize_tree, Method, quantize_tree
from ._report import Report, report, ReportRow, row_of
from ._results import float_arrays
from ._roles import weight_of
from ._rotations import check_rotations, rotation_of, Rotations
from ._rules import QuantizationRule, Rules
from ._scan_layers import scan_layers
from ._sites import Site, sites, Tree
from ._size import too_small
from ._table import as_text
from ._trainable import trainable_mask
from ._with_compute import with_compute


__all__ = [
    "average_trees",
    "cast_tree",
    "dequantize_tree",
    "quantize_cache",
    "quantize_tree",
    "register_weights",
    "Report",
    "report",
    "ReportRow",
    "QuantizationRule",
    "trainable_mask",
    "nbytes",
    "scan_layers",
    "WeightAxes",
    "with_compute",
]
