"""Numerics: products, quantizing and rounding, a folder for each platform.

From here come `xla`, `cpu` and `tpu`, each with a `dot` of the same signature (that of
`xla` is the reference, and serves where the others do not), and activations in int8.
Kernels know formats, but neither arrays nor derivatives. This room imports `formats`
and `_jax`.
"""

from . import cpu as cpu, tpu as tpu, xla as xla
from ._int8 import round_int8 as round_int8
