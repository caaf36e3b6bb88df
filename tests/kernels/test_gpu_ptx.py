"""Test the inline PTX of the GPU kernels against interpret mode, in an emulator."""

import functools as ft
import re

import eqquant
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import Binary, Int3, Int4, Int8, NF3, NF4, Ternary
from eqquant.formats import (
    Codebook,
    Int5,
    Int6,
    is_in_two_parts,
    pack,
    planes_of,
    Trellis,
    unpack_planes,
)
from eqquant.kernels import Matmul
from eqquant.kernels.gpu import _lookup, _ptx, _table, _two_parts, _windows
from eqquant.kernels.gpu._triton_plan import Tiles, TritonPlan
from jax.experimental.pallas import triton as plgpu


BASE = 0x400  # An arbitrary address of the table.


class Emulator:
    """Emulate the PTX instructions of the kernels, one thread at a time."""

    def __init__(self):
        self.shared: dict[int, int] = {}
        self.size = self.barriers = 0
        self.loaded: list[tuple[int, int]] = []

    def run(self, asm, args, dtype, constraints, pack):
        """Replace `_ptx.run` for NumPy arrays."""
        wanted = constraints.split(",")
        results = [x for x in wanted if "=" in x]
        assert {x.strip("=&") for x in results} <= {"r", "f"}
        args = [np.asarray(arg) for arg in args]
        words = [column for arg in args for column in self._words(arg, pack)]
        assert len(words) == len(wanted) - len(results)
        out = []
        for i, row in enumerate(zip(*words, strict=True)):
            names = [f"${len(results) + j}" for j in range(len(row))]
            registers = dict(zip(names, row, strict=True))
            values = self.emulate(asm, {**registers, "%laneid": i % 32})
            out += [values[f"${j}"] for j in range(len(results))]
        out = np.array(out, "<u4").view(jnp.dtype(dtype))
        return jnp.asarray(out.reshape(args[0].shape))

    def _words(self, arg, pack):
        """Split an array into registers of at most 32 bits."""
        width = min(arg.dtype.itemsize * pack, 4)
        numbers = np.ascontiguousarray(arg).reshape(-1, pack).view(f"<u{width}")
        return [[int(x) for x in column] for column in numbers.T]

    def emulate(self, asm: str, registers: dict[str, int]) -> dict[str, int]:
        """Run the PTX and return the registers."""
        values = {"levels": BASE, **registers}
        for name, operands in _parsed(asm):
            self._step(name, operands, values)
        return values

    def _step(self, name, operands, values):
        def of(text: str) -> int:
            return values[text] if text in values else int(text, 0)

        def address(text: str) -> int:
            register, _, offset = text.strip("[]").partition("+")
            found = of(register) + int(offset or 0)
            assert BASE <= found < BASE + self.size
            assert found % (2 if name.endswith("u16") else 4) == 0
            return found

        if name == ".shared":
            self.size = int(operands[0])
        elif name == "bar.sync":
            self.barriers += 1
        elif name == "st.shared.b32":
            self.shared[address(operands[0])] = of(operands[1])
        elif name in ("st.shared.v2.b32", "st.shared.v4.b32"):
            at, stored = address(operands[0]), operands[1].strip("{}").split(", ")
            assert at % (4 * len(stored)) == 0 and str(len(stored)) in name
            for i, word in enumerate(stored):
                self.shared[at + 4 * i] = of(word)
        elif name == "ld.shared.u16":
            at = address(operands[1])
            word = self.shared[at // 4 * 4] >> 8 * (at % 4)
            values[operands[0]] = word & 0xFFFF
        elif name == "ld.shared.b32":
            at = address(operands[1])
            self.loaded.append((values["%laneid"], at))
            values[operands[0]] = self.shared[at]
        else:
            target, *args = operands
            values[target] = OPERATIONS[name](*map(of, args)) & 0xFFFFFFFF


@ft.cache
def _parsed(asm: str) -> list[tuple[str, list[str]]]:
    steps = []
    for line in asm.splitlines():
        if declared := re.fullmatch(r"\.shared .* levels\[(\d+)\];", line):
            steps.append((".shared", [declared[1]]))
        elif line not in "{}" and not line.startswith(".reg"):
            name, _, operands = line.removesuffix(";").partition(" ")
            steps.append((name, re.split(r", (?![^{]*\})", operands)))
    return steps


def _bytes(*words: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in words)


def _prmt(a, b, select):
    picked = [(select >> 4 * i) & 15 for i in range(4)]
    assert max(picked) < 8  # Bit 3 would select the sign.
    return int.from_bytes(bytes(_bytes(a, b)[i] for i in picked), "little")


def _floats(dtype, function):
    def apply(*args):
        args = [np.frombuffer(_bytes(a), dtype).astype(np.float64) for a in args]
        exact = function(*args)
        rounded = exact.astype(dtype)
        # Decoding is exact. A product with a scale may be rounded.
        product = len(args) == 3 and not args[2].any()
        same = (rounded.astype(np.float64) == exact).all()
        assert dtype == np.float32 or same or product
        return int.from_bytes(rounded.tobytes(), "little")

    return apply


OPERATIONS = {
    "mov.u32": lambda a: a,
    "mov.b32": lambda a: a,
    "cvt.u32.u16": lambda a: a & 0xFFFF,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b,
    "or.b32": lambda a, b: a | b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "lop3.b32": lambda a, b, c, table: {
        0xEA: (a & b) | c,
        0xE2: (a & b) | (c & ~b),
    }[table],
    # A funnel shift of equal halves is a rotation.
    "shf.r.wrap.b32": lambda a, b, n: (b << 32 | a) >> (n & 31),
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _floats(jnp.bfloat16, lambda a, b, c: a * b + c),
    "fma.rn.f32": _floats(np.float32, lambda a, b, c: a * b + c),
    "fma.rn.f16x2": _floats(np.float16, lambda a, b, c: a * b + c),
    "add.rn.f16x2": _floats(np.float16, lambda a, b: a + b),
}


@pytest.fixture
def emulator(monkeypatch):
    emulator = Emulator()
    monkeypatch.setattr(_ptx, "run", emulator.run)
    return emulator


TWO, FOUR = Codebook((-0.5, 1.0)), Codebook((-1.0, -0.3, 0.5, 1.0))
IN_TWO_PARTS = [Int3(), NF3(), Int5(), Int5(block_size=64), Int6(block_size=16)]
FORMATS = [NF4(), Int4(), FOUR, TWO, Int8(), Ternary(), Binary(), *IN_TWO_PARTS]
CASES = [(f, "bfloat16", parts) for f in FORMATS for parts in (1, 2)]
CASES = [case for case in CASES if case[2] == 1 or not case[0].integer_levels]
CASES += [(f, "float16", 1) for f in FORMATS]


CASES = [(*case, pairs, False) for case in CASES for pairs in (1, 2)]
CASES += [(f, "bfloat16", 1, pairs, True) for f in FORMATS for pairs in (1, 2)]


@pytest.mark.parametrize("format, dtype, parts, pairs, scaled", CASES, ids=str)
def test_decoding_matches_interpret_mode(
    format, dtype, parts, pairs, scaled, emulator, normal
):
    if is_in_two_parts(format.bits):
        codes = _in_two_parts(format)
    else:
        codes = [_all_bytes(format)]
    by_ptx = _lookup.Decoder(format, dtype, parts, interpret=False, pairs=pairs)
    by_jax = _lookup.Decoder(format, dtype, parts, interpret=True)
    assert by_ptx.prepare(128) == 0
    scale = normal(*codes[0].shape).astype(dtype) if scaled else None
    for plane in range(planes_of(format.bits)):
        got, expected = by_ptx(codes, plane, scale), by_jax(codes, plane, scale)
        assert len(got) == len(expected) == parts
        for a, b in zip(got, expected, strict=True):
            assert a.dtype == b.dtype == dtype
            assert np.array_equal(np.asarray(a).view("<u2"), np.asarray(b).view("<u2"))


@pytest.mark.parametrize("dtype, scaled", [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_windows_are_decoded_to_the_levels_of_states(
    bits, dtype, scaled, emulator, normal, monkeypatch
):
    """With PTX and in interpret mode, for all places in a block."""
    format = Trellis(bits=bits, block_size=128)
    packed = np.random.default_rng(0).integers(0, 256, (4, 3 * 16 * bits), np.uint8)
    packed = jnp.asarray(packed)
    codes = _words_of(format, packed)
    by_ptx = _windows.WindowDecoder(format, dtype, interpret=False)
    by_jax = _windows.WindowDecoder(format, dtype, interpret=True)
    monkeypatch.setattr(plgpu, "load", lambda at: at.get())
    table = jnp.asarray(by_ptx.table)
    assert by_ptx.prepare(128, table) == 0
    assert emulator.size == 4 * len(emulator.shared) == _windows.table_bytes(format)
    assert emulator.barriers == 128
    scale = normal(*codes[0].shape).astype(dtype) if scaled else None
    levels = format.levels(format.ordered_states(packed), jnp.float32).astype(dtype)
    planes = levels.reshape(4, -1, _windows.planes_of_word(format))
    for plane in range(planes.shape[-1]):
        (got,) = by_ptx(codes, plane, scale)
        (expected,) = by_jax([*codes, table], plane, scale)
        assert got.dtype == expected.dtype == dtype
        assert np.array_equal(np.asarray(got), np.asarray(expected))
        exact = planes[..., plane] if scale is None else planes[..., plane] * scale
        assert np.array_equal(np.asarray(got), np.asarray(exact))


def _words_of(format, packed):
    """Return the operands of the decoder for all words of rows."""
    q = eqquant.quantize(jnp.ones((4, 384)), format)
    product = Matmul(format, False).of(jnp.ones((1, 384)), packed, q.scales)
    size = product.columns // _windows.planes_of_word(format)
    plan = TritonPlan(product, Tiles(16, 4, size, 1), "bfloat16", (1, 1), True)
    words = np.asarray(_windows.words(packed))
    codes = []
    for position, is_code in plan.codes_of(0):
        found = words[:, np.asarray(position)]
        codes.append(found if is_code is None else np.where(is_code, found, 0))
    for positions in plan.positions:
        found = positions[np.asarray(plan.positions_at(0))]
        codes.append(np.broadcast_to(found, codes[0].shape))
    return [*map(jnp.asarray, codes)]


def _all_bytes(format):
    codes = np.random.default_rng(0).permutation(256).astype(np.uint8)
    if format.unused_codes and format.bits < 8:
        low, high = codes & 0x55, codes & 0xAA
        codes = codes[high & ~(low << 1) == 0]  # Drop bytes with an unused code 10.
        codes = codes[: len(codes) // 4 * 4]
    return jnp.asarray(codes[None].view(format.code_dtype))


def _in_two_parts(format, groups: int = 4):
    """Return tiles of random codes, as the kernel loads them."""
    codes = np.random.default_rng(0).integers(
        0, 2**format.bits, (groups, format.group), np.uint8
    )
    packed = pack(codes, format.bits)
    high = _two_parts.high_bytes(format)
    run = packed.shape[1] - high
    rotations = np.tile(_two_parts.rotations(format, run), groups)
    parts = packed[:, :run], np.tile(packed[:, run:], run // high)
    return [jnp.asarray(part.reshape(1, -1)) for part in (*parts, rotations)]


@pytest.mark.parametrize("format", IN_TWO_PARTS, ids=str)
def test_parts_of_codes_are_joined(format):
    low, high, rotations = _in_two_parts(format)
    run = format.group // planes_of(format.bits)
    stored = _two_parts.high_bytes(format) + run
    packed = np.concatenate(
        [low.reshape(-1, run), high.reshape(-1, run)[:, : stored - run]], 1
    ).reshape(1, -1)
    expected = unpack_planes(jnp.asarray(packed), format.bits, format.group)
    for plane in range(planes_of(format.bits)):
        joined = _two_parts.joined(low, high, rotations, format.bits, plane)
        assert np.array_equal(joined, expected[:, plane])


@pytest.mark.parametrize(
    "parts, threads",
    [(1, 128), pytest.param(1, 256, marks=pytest.mark.slow), (2, 256)],
)
@pytest.mark.parametrize("format", [NF4(), FOUR, TWO], ids=str)
def test_the_table_has_a_copy_for_each_bank(format, parts, threads, emulator):
    decode = _lookup.Decoder(format, "bfloat16", parts, interpret=False)
    decode.prepare(threads)
    assert emulator.size == len(emulator.shared) * 4 == _table.size_of(format.bits)
    # The memory that Triton places after the table must stay aligned.
    assert emulator.size % 1024 == 0
    assert emulator.barriers == threads  # Each thread waits for all others.
    low = np.arange(4**format.bits) % 2**format.bits
    high = np.arange(4**format.bits) >> format.bits
    for part, table in enumerate(decode.tables):
        entries = np.stack([table[low], table[high]], 1).view("<u4").ravel()
        for copy in range(0, 32, parts):
            words = [
                emulator.shared[BASE + 128 * entry + 4 * (copy + part)]
                for entry in range(len(entries))
            ]
            assert np.array_equal(words, entries)
        # For one warp: the number of lanes that access the same bank.
        emulator.loaded.clear()
        codes = np.random.default_rng(0).integers(0, 256, (1, 64), np.uint8)
        _ptx.on_bytes(decode.texts(0)[part], [jnp.asarray(codes)], "bfloat16", 1)
        banks = [at // 4 % 32 for _, at in emulator.loaded]
        assert np.bincount(banks).max() == parts


def test_multiply_add(emulator, normal):
    x, y, z = normal(3, 40)
    got = _ptx.multiply_add(x, y, z, interpret=False)
    exact = [np.asarray(v, np.float64) for v in (x, y, z)]
    expected = exact[0] * exact[1] + exact[2]
    assert np.array_equal(got, expected.astype(np.float32))
    assert np.allclose(_ptx.multiply_add(x, y, z, interpret=True), expected, atol=1e-6)
