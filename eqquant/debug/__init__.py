"""Inspection: proofs and reports about compiled programs.

Exports assertions, `explain`, `collectives`, `compile_for_tpu` and `compile_for_gpu`.
Imports `dispatch`, `arrays`, `primitives`, `kernels`, `formats` and `_jax`.
"""

from ._collectives import Collective, collectives
from ._compile import compile_for_gpu, compile_for_tpu
from ._environment import environment
from ._explain import explain
from ._gpu_program import GPUKernel, GPUProgram
from ._inspect import assert_not_materialised, assert_trainable


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
]

# As in the other public modules, which `eqquant` imports itself.
for _name in __all__:
    globals()[_name].__module__ = __name__
