"""Models over many devices: how they are split, and what products are told of it.

Exports `shard_tree`. Imports `trees`, `arrays`, `primitives` and `_jax`.
"""

from ._shard_tree import shard_tree as shard_tree
