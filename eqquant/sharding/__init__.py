"""Models over many devices: how they are split, and what products are told of it.

Exports `shard_tree`; and for modules that quantize their arrays
when they are called, `QuantizesLater`, `Split` and `check_spec`. Imports `trees`,
`arrays`, `primitives` and `_jax`.
"""

from ._quantizes_later import QuantizesLater as QuantizesLater
from ._shard_tree import shard_tree as shard_tree
from ._specs import check_spec as check_spec
from ._split import Split as Split


__all__ = [
    "shard_tree",
]
