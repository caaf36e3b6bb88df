"""Limits of sums of int8 products."""

import os
import re


# The longest sums of int8 products that int32 and float32 hold.
longest_int8_sum = (2**31 - 1) // 127**2
longest_float32_sum = 2**24 // 127**2
# Flags with which XLA takes a tile without measuring others.
_not_measured = re.compile("autotune_level=0|deterministic_ops(=true|=1|$| )")


def gpu_sums_int8(size: int) -> bool:
    """Return whether XLA may multiply int8 on GPUs, for sums of `size` products.

    Otherwise, multiply in bfloat16, which is exact for up to `longest_float32_sum`
    products. A tile of XLA's Triton matmul for NVIDIA GPUs may have only 16 int8 along
    the contracted axis, but the instruction of the tensor cores multiplies 32. Triton
    then passes each operand twice, and all sums are doubled (jaxlib 0.10.2 and 0.11.2).
    For up to 16 products, there is no other tile. For many products, XLA measures
    several tiles, and these small ones are slow.
    """
    measures = not _not_measured.search(os.environ.get("XLA_FLAGS", ""))
    return measures and size > longest_float32_sum
