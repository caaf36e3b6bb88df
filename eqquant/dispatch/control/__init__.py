"""Primitives that hold jaxprs: calls, loops, branches, custom rules, meshes.

Each is rebuilt with the public function that made it (`lax.scan`, `jax.checkpoint`,
...), around the interpreted jaxpr. These functions take pytrees, and so implicit
arrays. No private parameter is ever put together here.
"""

from . import (
    _calls as _calls,
    _custom as _custom,
    _loops as _loops,
    _shard_map as _shard_map,
)
