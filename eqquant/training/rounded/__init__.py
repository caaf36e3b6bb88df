"""Training in low precision: products whose operands are rounded in both directions."""

from ._array import LowPrecisionArray as LowPrecisionArray
from ._codes import (
    absmax as absmax,
    from_blocks as from_blocks,
    in_blocks as in_blocks,
    round_to as round_to,
    rounding_by as rounding_by,
)
from ._policy import save_quantized as save_quantized
from ._specs import Recipe as Recipe
from ._tree import (
    low_precision as low_precision,
    master_weights as master_weights,
    with_rounding_key as with_rounding_key,
)
