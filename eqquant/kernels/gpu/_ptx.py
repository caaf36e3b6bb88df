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


def on_bytes(asm: str, args: list[Shaped[Array, "*shape"]], dtype, pairs: int):
    """From so many pairs of bytes to numbers of 16 bits, by a text of [`decoding`][].
    `args` are the codes, and scales of `dtype` if there are any.

    Where tensor cores want a pair of numbers, Triton moves a pair of codes: of four it
    would have to put a register together first. Of many rows it moves four.
    """
    results, codes = ["=r"] * pairs, "h" if pairs == 1 else "r"
    constraints = [*results, codes, *["r"] * pairs * (len(args) - 1)]
    return run(asm, args, dtype, ",".join(constraints), pack=2 * pairs)


def decoding(registers: str, lines: list[str], pairs: int, scaled: bool) -> str:
    """A text that makes of the codes, which `lines` have in `s`, pairs of numbers, from
    `$0` on; scaled then, if scales follow the codes, and these are in bfloat16."""
    named = ", ".join(filter(None, ["s", registers, "z" if scaled else ""]))
    load = "cvt.u32.u16 s, $1;" if pairs == 1 else f"mov.b32 s, ${pairs};"
    lines = [load, *lines]
    if scaled:
        lines.append("mov.u32 z, 0x80008000;")  # What a product is added to: -0.
    for i in range(pairs if scaled else 0):
        lines.append(f"fma.rn.bf16x2 ${i}, ${i}, ${pairs + 1 + i}, z;")
    return block(named, lines)


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
