"""Tools to find out, and to prove, what happens to quantized arrays.

From here come proofs that nothing is decoded in full, an account of what each product
becomes, and a compiler for TPUs that are not here. This room imports `dispatch`,
`arrays`, `primitives` and `_jax`.
"""

from ._compile import compile_for_tpu as compile_for_tpu
from ._inspect import (
    assert_not_materialised as assert_not_materialised,
    assert_trainable as assert_trainable,
    explain as explain,
)
