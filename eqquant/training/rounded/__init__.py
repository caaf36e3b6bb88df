"""Training in low precision: products whose operands are rounded in both directions."""

from ._array import LowPrecisionArray
from ._codes import absmax, from_blocks, in_blocks, round_to, rounding_by
from ._policy import save_quantized
from ._primitives import jaxpr_of_product, low_precision_dot_p
from ._specs import Recipe
from ._tree import low_precision, master_weights, with_rounding_key
