"""Inline PTX in Triton kernels.

A text processes one or several elements of its operands in registers `$1`, `$2`,
..., and writes its result to `$0`. Interpret mode does not support PTX.
`tests/kernels/test_gpu_ptx.py` has an emulator.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped


def run(
    asm: str, args: list[Shaped[Array, "*shape"]], dtype, constraints: str, pack: int
) -> Shaped[Array, "*shape"]:
    """Run PTX for every `pack` elements of `args`."""
    # Some versions of jaxlib have no Triton.
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
    """Decode `pairs` pairs of bytes at a time to 16-bit numbers, by PTX of
    [`decoding`][]. `args` are the bytes of each part of the codes, rotations in int32
    if there are two parts, and, optionally, scales in `dtype`.

    Tensor cores take pairs of numbers, so Triton moves pairs of codes. It would have to
    assemble a register of four. For many rows it moves four codes.
    """
    constraints = ["=r"] * pairs
    for arg in args:
        size = 2 * pairs * arg.dtype.itemsize
        constraints += ["h"] if size == 2 else ["r"] * (size // 4)
    return run(asm, args, dtype, ",".join(constraints), pack=2 * pairs)


def decoding(
    registers: str,
    lines: list[str],
    pairs: int,
    scaled: bool,
    join: tuple[str, ...] = (),
) -> str:
    """Return PTX that decodes the codes in `s` by `lines`, to pairs of numbers from
    `$0` on. If `scaled`, bfloat16 scales follow the codes and multiply the numbers.

    Codes in two parts have another operand with high parts, and one rotation for each
    code. `join` are lines that move the high parts in `h` by the rotation `n` into `s`.
    """
    load = "cvt.u32.u16" if pairs == 1 else "mov.b32"
    loads, scales = [f"{load} s, ${pairs};"], pairs + 1
    if join:
        # The codes of a register share a rotation.
        loads += [f"{load} h, ${pairs + 1};", f"mov.u32 n, ${pairs + 2};", *join]
        scales += 1 + 2 * pairs
    named = ["s", registers, "h, n" if join else "", "z" if scaled else ""]
    named = ", ".join(filter(None, named))
    lines = [*loads, *lines]
    if scaled:
        lines.append("mov.u32 z, 0x80008000;")  # -0, the neutral addend of a product.
    for i in range(pairs if scaled else 0):
        lines.append(f"fma.rn.bf16x2 ${i}, ${i}, ${scales + i}, z;")
    return block(named, lines)


def block(registers: str, lines: list[str]) -> str:
    """Return PTX with its own registers."""
    return "{\n.reg .b32 " + registers + ";\n" + "\n".join(lines) + "\n}"


def multiply_add(
    x: Float[Array, "*shape"],
    y: Float[Array, "*shape"],
    z: Float[Array, "*shape"],
    interpret: bool,
) -> Float[Array, "*shape"]:
    """Return `x * y + z` in float32 by one instruction: XLA disables FMA in Triton."""
    if interpret:
        return x * y + z
    return run(fma, [x, y, z], jnp.float32, "=f,f,f,f", pack=1)


fma = "fma.rn.f32 $0, $1, $2, $3;"
