"""Whole pytrees: selection of weights, quantization and reports.

Exports `quantize_tree`, `dequantize_tree`, `with_compute`, the report, and the choice
of weights, which training shares. Imports `dispatch`, `arrays`, `kernels`, `formats`
and `_jax`.
"""

from ._average_trees import average_trees as average_trees
from ._cache import quantize_cache as quantize_cache
from ._calibration import (
    AbstractCalibration as AbstractCalibration,
    Rounder as Rounder,
)
from ._cast_tree import cast_tree as cast_tree
from ._choice import (
    base_of as base_of,
    Choice as Choice,
    choose as choose,
    choose_among as choose_among,
    replace_base as replace_base,
    replace_chosen as replace_chosen,
)
from ._conventions import (
    Axis as Axis,
    register_weights as register_weights,
    WeightAxes as WeightAxes,
)
from ._errors import errors_at as errors_at
from ._forward import check_forward as check_forward, each_batch as each_batch
from ._layers import match_layers as match_layers
from ._left_out import warn_of_left_out as warn_of_left_out
from ._nbytes import nbytes as nbytes
from ._progress import with_progress as with_progress
from ._quantize import (
    dequantize_tree as dequantize_tree,
    Method as Method,
    quantize_tree as quantize_tree,
)
from ._report import (
    Report as Report,
    report as report,
    ReportRow as ReportRow,
    row_of as row_of,
)
from ._results import float_arrays as float_arrays
from ._roles import weight_of as weight_of
from ._rules import QuantizationRule as QuantizationRule, Rules as Rules
from ._scan_layers import scan_layers as scan_layers
from ._sites import Site as Site, sites as sites, Tree as Tree
from ._size import too_small as too_small
from ._table import as_text as as_text
from ._trainable import trainable_mask as trainable_mask
from ._with_compute import with_compute as with_compute


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
