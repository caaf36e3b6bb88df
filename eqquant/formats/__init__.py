"""What codes mean: packing, scales, and one small file per format.

Exports the formats, `as_format`, and functions that pack codes and handle scales. A
format knows nothing of products, arrays or JAX primitives. Imports nothing of eqquant.
To add a format, see CONTRIBUTING.md.
"""

from ._binary import Binary as Binary
from ._format import (
    Format as Format,
    largest_scale as largest_scale,
    max_blocks as max_blocks,
    Precision as Precision,
)
from ._int8 import Int8 as Int8
from ._nf4 import NF4 as NF4
from ._pack import (
    codes_per_byte as codes_per_byte,
    from_plane_order as from_plane_order,
    pack as pack,
    to_plane_order as to_plane_order,
    unpack as unpack,
    unpack_planes as unpack_planes,
)
from ._registry import as_format as as_format, formats as formats
from ._scales import (
    float_scales as float_scales,
    gather_scales as gather_scales,
    num_groups as num_groups,
    QuantizedScales as QuantizedScales,
    scales_split as scales_split,
    slice_scales as slice_scales,
)
from ._ternary import Ternary as Ternary
from ._tpu import TPUKernel as TPUKernel
