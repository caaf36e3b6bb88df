"""Inspection: proofs and reports about compiled programs.

Exports assertions, `explain`, `collectives`, `compile_for_tpu` and `compile_for_gpu`.
Imports `dispatch`, `arrays`, `primitives`, `kernels`, `formats` and `_jax`.
"""

from ._collectives import Collective as Collective, collectives as collectives
from ._compile import (
    compile_for_gpu as compile_for_gpu,
    compile_for_tpu as compile_for_tpu,
)
from ._environment import environment as environment
from ._explain import explain as explain
from ._gpu_program import (
    GPUKernel as GPUKernel,
    GPUProgram as GPUProgram,
)
from ._inspect import (
    assert_not_materialised as assert_not_materialised,
    assert_trainable as assert_trainable,
)


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
