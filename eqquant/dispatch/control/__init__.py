"""Primitives with inner jaxprs: calls, loops, branches, custom rules, meshes.

Each is rebuilt with its public function (`lax.scan`, `jax.checkpoint`, ...) around the
interpreted jaxpr. These functions accept pytrees, and therefore implicit arrays. No
code here constructs private parameters of JAX.
"""

from . import (
    _calls as _calls,
    _custom as _custom,
    _loops as _loops,
    _shard_map as _shard_map,
    _solve as _solve,
)
