"""Inline PTX in a kernel of Pallas and Triton.

A text stands for a few elements of its operands, in registers `$1`, `$2`, ..., and puts
its result in `$0`. No interpreter knows it; `tests/kernels/test_gpu_ptx.py` does.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def run(
    asm: str, args: list[Shaped[Array, "*shape"]], dtype, constraints: str, pack: int
) -> Shaped[Array, "*shape"]:
    """The result of a text for each `pack` elements of all of `args`."""
    # Not every jaxlib has Triton, which is needed for a GPU alone.
    from jax.experimental.pallas import triton as plgpu

    (out,) = plgpu.elementwise_inline_asm(
        asm,
        args=args,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


def on_pairs(asm: str, codes: Shaped[Array, "*shape"], dtype):
    """From two bytes, in `$1`, to two numbers of 16 bits, in `$0`.

    Two, because Triton moves codes to where tensor cores want numbers, and there these
    are in pairs. Of four bytes it would have to put a register together first.
    """
    return run(asm, [codes], dtype, "=r,h", pack=2)


def block(registers: str, lines: list[str]) -> str:
    """A text with registers of its own."""
    return "{\n.reg .b32 " + registers + ";\n" + "\n".join(lines) + "\n}"


def multiply_add(
    x: Float[Array, "*shape"],
    y: Float[Array, "*shape"],
    z: Float[Array, "*shape"],
    interpret: bool,
) -> Float[Array, "*shape"]:
    """`x * y + z` in float32, as one instruction: XLA has Triton make two of it."""
    if interpret:
        return x * y + z
    return run(fma, [x, y, z], jnp.float32, "=f,f,f,f", pack=1)


fma = "fma.rn.f32 $0, $1, $2, $3;"
