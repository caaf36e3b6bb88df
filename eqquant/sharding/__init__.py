"""Models on several devices: placement of arrays, and plans for their products.

Exports `shard_tree`, and `QuantizesLater`, `Split` and `check_spec` for modules that
quantize their arrays in each call. Imports `trees`,
`arrays`, `partition` and `_jax`.
"""

from ._shard_tree import shard_tree
from ._specs import check_spec
from ._split import QuantizesLater, Split


__all__ = ["shard_tree"]
