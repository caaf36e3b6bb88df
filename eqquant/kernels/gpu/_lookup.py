"""From codes to numbers of 16 bits that tensor cores multiply, in registers.

Four bytes of codes are in one register. A table of at most 16 numbers is looked up by
`prmt`, which picks four bytes out of eight by the nibbles of a register: one for the
low bytes of the numbers, one for the high ones. Integers of 8 bits become the mantissa
of a number whose exponent is known, of which what is too much is subtracted. The bits
of ternary and binary codes become the sign, and the highest of the exponent.

Each is inline PTX, one text for each plane: what planes share, NVIDIA's assembler
computes once. In interpret mode, which knows no PTX, the same is computed in JAX.
"""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ...formats import Format
from ._levels import table_of


def _asm(registers: str, lines: list[str]) -> str:
    """Four bytes are in `$2`, and a zero in `$3`. Two numbers are to be in `$0`, and
    two in `$1`."""
    return "{\n.reg .b32 " + registers + ";\n" + "\n".join(lines) + "\n}"


# Zero, but NVIDIA's assembler does not know: it would keep constants where `prmt` does
# not reach them, and move each one again for every use.
_zero = [
    "mov.u32 z, %laneid;",
    "popc.b32 z, z;",
    "mul.lo.u32 z, z, z;",
    "shr.u32 z, z, 6;",
]
hidden_zero = _asm("z", [*_zero, "or.b32 $0, $1, z;"])


def can_decode(format: Format) -> bool:
    """Whether there is a way from the codes to numbers of 16 bits."""
    return format.bits in (1, 2, 4) or (format.bits == 8 and format.integer_levels)


# What codes stand for whose highest bit is a sign, by their number of bits.
_signed_codes = {1: {0: 1, 1: -1}, 2: {0: 0, 1: 1, 3: -1}}


def is_signed(format: Format) -> bool:
    """Whether the bits of codes are a sign, and whether the level is not zero."""
    levels = _signed_codes.get(format.bits, {})
    used = [c for c in range(2**format.bits) if c not in format.unused_codes]
    return format.unit_levels and all(
        levels.get(code) == table_of(format)[code] for code in used
    )


class Decoder:
    """Codes to `parts` numbers of `dtype` whose sum, times `unit`, is the level."""

    def __init__(self, format: Format, dtype, parts: int, interpret: bool):
        self.bits, self.dtype = format.bits, jnp.dtype(dtype)
        self.interpret, self.unit = interpret, 1.0
        self.tables: list[np.ndarray] = []
        self._zero = None
        if self.bits == 8:
            return
        levels = np.asarray(table_of(format), np.float32)
        self.signed = is_signed(format)
        if self.signed:
            # The highest bit of the exponent alone is a 2.
            levels, self.unit = levels * 2, 0.5
        for _ in range(parts):
            self.tables.append(levels.astype(self.dtype))
            levels = levels - self.tables[-1].astype(np.float32)

    def prepare(self, shape: tuple[int, int]) -> None:
        """In a kernel, before its loop, for codes of such a shape.

        Where a zero that depends on no load is an operand, Triton decodes codes where
        it has loaded them, four to a register, and brings what it has decoded in the
        order of tensor cores, through shared memory. Otherwise it does so with the
        codes, two and two, which it then has to put together byte by byte. That is
        better where a byte has four codes or more, of which shared memory would be the
        limit.
        """
        if not self.interpret and self.bits >= 4:
            zero = jnp.zeros(shape, jnp.int8)
            self._zero = _run(hidden_zero, [zero], jnp.int8)

    def __call__(
        self, codes: Shaped[Array, "rows bytes"], plane: int
    ) -> list[Shaped[Array, "rows bytes"]]:
        """One plane of a tile: its parts, the largest first."""
        if self.bits == 8:
            if self.interpret:
                return [codes.astype(self.dtype)]
            return [self._run(integers(self.dtype), codes)]
        if self.interpret:
            index = codes >> jnp.uint8(plane * self.bits)
            index = index & jnp.uint8(2**self.bits - 1)
            return [_select(table, index) for table in self.tables]
        if self.signed:
            return [self._run(signed(self.bits, plane), codes)]
        return [
            self._run(looked_up(_bits(table), self.bits, plane), codes)
            for table in self.tables
        ]

    def _run(self, asm: str, codes):
        zero = [] if self._zero is None else [self._zero]
        return _run(asm, [codes, *zero], self.dtype)


def _bits(table: np.ndarray) -> tuple[int, ...]:
    return tuple(int(x) for x in table.view(np.uint16))


def _select(table: np.ndarray, index: Shaped[Array, "..."]):
    out = jnp.full(index.shape, table[0], table.dtype)
    for code, entry in enumerate(table):
        out = jnp.where(index == code, entry, out)
    return out


def _run(asm: str, args: list, dtype):
    """Four elements at a time."""
    # Not every jaxlib has Triton, which is needed for a GPU alone.
    from jax.experimental.pallas import triton as plgpu

    registers = 4 * jnp.dtype(dtype).itemsize // 4
    (out,) = plgpu.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join(["=&r"] * registers + ["r"] * len(args)),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return out


@ft.cache
def looked_up(table: tuple[int, ...], bits: int, plane: int) -> str:
    """PTX that looks up the bits of numbers: of one plane of the codes."""
    per_nibble = 4 // bits
    second, shift = divmod(plane, per_nibble)
    lines = ["mov.b32 z, $3;"] if bits == 4 else list(_zero)
    lines += [f"shr.u32 s, $2, {shift * bits};"]
    if bits == 4:
        lines += ["shr.u32 u, s, 3;", "and.b32 u, u, 0x11111111;"]
        lines += ["xor.b32 k, z, 0xff00;"]
    lines += [f"and.b32 s, s, {min(2**bits - 1, 7) * 0x11111111:#010x};"]
    words = np.array(table, np.uint16)
    halves = []
    for name, half in (("l", words & 255), ("h", words >> 8)):
        bytes_of = np.zeros(-(-len(half) // 8) * 8, np.uint8)
        bytes_of[: len(half)] = half
        if len(set(half.tolist())) == 1 and half[0] == 0:
            continue
        halves.append((name, bytes_of.view("<u4")))
    for name, entries in halves:
        for i, entry in enumerate(entries):
            lines.append(f"xor.b32 {name}{i}, z, {int(entry):#010x};")
    for out in range(2):
        if out:
            lines += ["shr.u32 s, s, 16;"] + ["shr.u32 u, u, 16;"] * (bits == 4)
        if bits == 4:
            lines.append("prmt.b32 m, k, k, u;")
        lines += ["mov.b32 l, 0;", "mov.b32 h, 0;"]
        for name, entries in halves:
            if len(entries) == 2:
                lines.append(f"prmt.b32 {name}, {name}0, {name}1, s;")
                continue
            for i, half in ((0, "p"), (2, "q")):
                lines.append(f"prmt.b32 {half}, {name}{i}, {name}{i + 1}, s;")
            # q where the mask is set, else p.
            lines.append(f"lop3.b32 {name}, m, q, p, 0xca;")
        lines.append(f"prmt.b32 ${out}, l, h, {'0x7351' if second else '0x6240'};")
    registers = ", ".join(f"{name}{i}" for name in "lh" for i in range(4))
    return _asm(f"z, s, u, k, m, p, q, l, h, {registers}", lines)


@ft.cache
def signed(bits: int, plane: int) -> str:
    """PTX that brings the bits of a plane of the codes to the top of numbers."""
    lines = []
    for out, select in enumerate(("0x1404", "0x3424")):
        lines += [
            f"prmt.b32 s, $2, 0, {select};",
            f"shl.b32 s, s, {8 - bits - plane * bits};",
        ]
        if bits == 1:
            lines.append(f"lop3.b32 ${out}, s, 0x80008000, 0x40004000, 0xea;")
        else:
            lines.append(f"and.b32 ${out}, s, 0xc000c000;")
    return _asm("s", lines)


@ft.cache
def integers(dtype) -> str:
    """PTX that converts integers of 8 bits."""
    if jnp.dtype(dtype) == jnp.float16:
        # 1024 + 128 + i, whose low byte is i + 128.
        return _asm(
            "s, e, c",
            [
                "xor.b32 s, $2, 0x80808080;",
                "xor.b32 e, $3, 0x64646464;",
                "xor.b32 c, $3, 0xe480e480;",
                "prmt.b32 $0, s, e, 0x4140;",
                "prmt.b32 $1, s, e, 0x4342;",
                "add.rn.f16x2 $0, $0, c;",
                "add.rn.f16x2 $1, $1, c;",
            ],
        )
    # 128 + the low seven bits, less 128, or 256 if the sign is set.
    lines = [
        "xor.b32 one, $3, 0x3f803f80;",
        "xor.b32 a, $3, 0x43004300;",
        "xor.b32 b, $3, 0xc300c300;",
    ]
    for out, select in enumerate(("0x4140", "0x4342")):
        lines += [
            f"prmt.b32 s, $2, 0, {select};",
            "lop3.b32 p, s, 0x007f007f, a, 0xea;",
            "lop3.b32 q, s, 0x00800080, b, 0xea;",
            f"fma.rn.bf16x2 ${out}, p, one, q;",
        ]
    return _asm("s, p, q, a, b, one", lines)
