"""Primitives with inner jaxprs: calls, loops, branches, custom rules, meshes.

Each is rebuilt with its public function (`lax.scan`, `jax.checkpoint`, ...) around the
interpreted jaxpr. These functions accept pytrees, and therefore implicit arrays. No
code here constructs private parameters of JAX.
"""

from . import _calls, _custom, _loops, _shard_map, _solve
