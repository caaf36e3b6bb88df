"""Inspection: proofs and reports about compiled programs.

Exports assertions, `explain`, `collectives`, `saturated`, `compile_for_tpu` and
`compile_for_gpu`. Imports `training`, `trees`, `dispatch`, `arrays`, `primitives`,
`kernels`, `formats` and `_jax`.
"""

from ._collectives import Collective, collectives
from ._compile import compile_for_gpu, compile_for_tpu
from ._environment import environment
from ._explain import explain
from ._gpu_program import GPUKernel, GPUProgram
from ._inspect import assert_not_materialised, assert_trainable
from ._saturated import saturated, Saturation


__all__ = [
    "assert_not_materialised",
    "assert_trainable",
    "Collective",
    "collectives",
    "compile_for_gpu",
    "compile_for_tpu",
    "environment",
    "explain",
    "GPUKernel",
    "GPUProgram",
    "Saturation",
    "saturated",
]

# As in the other public modules, which `eqquant` imports itself.
for _name in __all__:
    globals()[_name].__module__ = __name__
