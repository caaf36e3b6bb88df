"""Formats: packing of codes, scales, and one small file per format.

Exports the formats, `as_format`, and functions that pack codes and handle scales.
Formats do not use products, arrays or JAX primitives. Imports `_jax`.
docs/internals/extending.md describes how to add one.
"""

from ._binary import Binary as Binary
from ._codebook import Codebook as Codebook, NF2 as NF2, NF3 as NF3
from ._contract import check_contract as check_contract
from ._fitted import FittedFormat as FittedFormat
from ._format import (
    Format as Format,
    largest_scale as largest_scale,
    max_blocks as max_blocks,
)
from ._fp4 import MXFP4 as MXFP4, NVFP4 as NVFP4
from ._fp8 import FP8 as FP8
from ._int8 import Int8 as Int8
from ._integers import (
    Int2 as Int2,
    Int3 as Int3,
    Int4 as Int4,
    Int5 as Int5,
    Int6 as Int6,
)
from ._nf4 import NF4 as NF4
from ._pack import (
    from_plane_order as from_plane_order,
    is_in_two_parts as is_in_two_parts,
    num_bytes as num_bytes,
    num_codes as num_codes,
    pack as pack,
    planes_of as planes_of,
    to_plane_order as to_plane_order,
    unpack as unpack,
    unpack_planes as unpack_planes,
)
from ._problems import (
    abstract_scales as abstract_scales,
    problems_of as problems_of,
    problems_of_scales as problems_of_scales,
)
from ._registry import (
    as_format as as_format,
    every_format as every_format,
    formats as formats,
)
from ._scales import (
    float_scales as float_scales,
    gather_scales as gather_scales,
    PowerOfTwoScales as PowerOfTwoScales,
    scales_and_offsets as scales_and_offsets,
    scales_split as scales_split,
    ShortScales as ShortScales,
    slice_scales as slice_scales,
)
from ._ternary import Ternary as Ternary
from ._trellis import Trellis as Trellis
from ._two_level_scales import (
    Float8Scales as Float8Scales,
    FourBitScales as FourBitScales,
    GROUP as GROUP,
    IntegerScales as IntegerScales,
    num_groups as num_groups,
    QuantizedOffsets as QuantizedOffsets,
    QuantizedScales as QuantizedScales,
)


__all__ = [
    "Binary",
    "Codebook",
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
