"""Formats: packing of codes, scales, and one small file per format.

Exports the formats, `as_format`, and functions that pack codes and handle scales.
Formats do not use products, arrays or JAX primitives. Imports `_jax`.
docs/internals/extending.md describes how to add one.
"""

from ._binary import Binary
from ._codebook import Codebook, NF2, NF3
from ._contract import check_contract
from ._fitted import FittedFormat
from ._format import Format, largest_scale, max_blocks
from ._fp4 import MXFP4, NVFP4
from ._fp8 import FP8
from ._int8 import Int8
from ._integers import Int2, Int3, Int4, Int5, Int6
from ._nf4 import NF4
from ._pack import (
    from_plane_order,
    is_in_two_parts,
    num_bytes,
    num_codes,
    pack,
    parts_of,
    planes_of,
    to_plane_order,
    unpack,
    unpack_planes,
)
from ._problems import abstract_scales, problems_of, problems_of_scales
from ._registry import as_format, every_format, format_names, formats
from ._scales import (
    float_scales,
    gather_scales,
    PowerOfTwoScales,
    scales_and_offsets,
    scales_split,
    ShortScales,
    slice_scales,
)
from ._ternary import DenseTernary, Ternary
from ._trellis import Trellis
from ._two_level_scales import (
    Float8Scales,
    FourBitScales,
    GROUP,
    IntegerScales,
    num_groups,
    QuantizedOffsets,
    QuantizedScales,
)


__all__ = [
    "Binary",
    "Codebook",
    "DenseTernary",
    "Float8Scales",
    "Format",
    "FourBitScales",
    "FP8",
    "Int2",
    "Int3",
    "Int4",
    "Int5",
    "Int6",
    "Int8",
    "IntegerScales",
    "MXFP4",
    "NF2",
    "NF3",
    "NF4",
    "NVFP4",
    "PowerOfTwoScales",
    "QuantizedOffsets",
    "QuantizedScales",
    "Ternary",
    "Trellis",
]
