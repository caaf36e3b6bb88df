"""The choice of native kernels, for all kinds of CPUs."""

import functools as ft
import itertools

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant import Binary, FP8, Int3, Int4, Int8, MXFP4, NF4, NVFP4, Ternary
from eqquant.formats import Int2, Int6, Trellis
from eqquant.formats._history import LinearTable
from eqquant.kernels import choose, cpu, Matmul
from eqquant.kernels.cpu import _choose
from eqquant.kernels.cpu._library import Library


# Instruction sets by their names in kernels; each includes the earlier ones in its row.
X86 = {"AVX2": "avx2", "AVX-512": "avx512", "VNNI": "vnni", "AMX": "amx"}
ARM = {"NEON": "neon", "dotprod": "dotprod", "i8mm": "i8mm"}
SETS = [
    (*names[:i], name)
    for names in map(list, (X86, ARM))
    for i, name in enumerate(names)
]
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@pytest.fixture
def on(monkeypatch):
    """Limit the CPU to these instructions."""

    def have(name):
        (names,) = (names for names in SETS if names[-1] == name)
        instructions = tuple((X86 | ARM)[n] for n in names)
        library = Library(instructions, lambda *_: 0, lambda *_: 0)
        monkeypatch.setattr(_choose, "load", lambda: library)

    return have


def of_shape(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def name_of(product):
    kernel = choose(cpu.KERNELS, product)
    return None if isinstance(kernel, str) else kernel.name


def why_not(product):
    kernel = choose(cpu.KERNELS, product)
    return kernel if isinstance(kernel, str) else None


def described_by(product):
    return choose(cpu.KERNELS, product).describe(product)


@ft.cache
def described(format, rows, size):
    return jax.eval_shape(lambda: eqquant.quantize(jnp.zeros((rows, size)), format))


def product(format, m, rows=4096, size=4096, contract_rows=False, **how):
    """The operands, and the parameters."""
    q = described(format, rows, size)
    dtype = how.pop("x_dtype", F32)
    x = of_shape((m, rows if contract_rows else format.padded(size)), dtype)
    compute = eqquant.kernels.Compute(how.pop("precision", "high"))
    matmul = Matmul(format, contract_rows, compute, **how)
    return (x, q.codes, q.scales), matmul


FORMATS = [NF4(), Int8(), Int8(block_size=128), Int4(), Binary(), FP8()]
PRECISIONS = ("default", "high", "highest")
ROWS = (1, 7, 8, 12, 16, 32, 64, 65, 128, 1000)
SMALL, TINY = ({"rows": n, "size": n} for n in (1024, 256))
INT8 = jnp.dtype("int8")
ROUNDED, EXACT = ({"precision": name} for name in ("default", "highest"))


@pytest.mark.parametrize("names", SETS, ids=lambda names: names[-1])
def test_what_every_choice_keeps_to(names, on):
    on(names[-1])
    seen = set()
    for format, precision, contract_rows in itertools.product(
        FORMATS, PRECISIONS, (False, True)
    ):
        how = {"precision": precision, "contract_rows": contract_rows}
        args, matmul = product(format, 1, **how)
        for m in ROWS:
            x = of_shape((m, args[0].shape[-1]))
            product_of_m = matmul.of(x, *args[1:])
            chosen = name_of(product_of_m)
            seen.add(chosen)
            if chosen is None:
                assert m > 1, "a product of a vector has a native kernel"
                continue
            kind, _, needs = chosen.partition(", ")
            assert needs in names, "instructions are missing"
            if precision == "highest":
                assert kind == "float", "weights and activations are exact"
            if kind == "int8":
                assert precision == "default", "8 bits are not for a high precision"
            assert kind != "bfloat16", "operands are in float32"
            if contract_rows and needs != "AMX":
                assert kind in ("float", "int16"), "the others add along rows of codes"
            assert repr(chosen) in choose(cpu.KERNELS, product_of_m).describe(
                product_of_m
            )
    kinds = {chosen.partition(", ")[0] for chosen in seen if chosen}
    basic = {"float", "int8", "int8x2"}
    expected = {"AVX2": {"float", "int16", "int8"}, "dotprod": basic, "i8mm": basic}
    expected |= dict.fromkeys(("VNNI", "AMX"), basic | {"int16"})
    assert kinds == expected.get(names[-1], {"float"})


@pytest.mark.parametrize(
    "name, format, m, how, expected",
    [
        # XLA serves few rows of int8 activations, but not of float activations.
        ("AVX2", Int8(), 33, {"precision": "default"}, None),
        ("AVX2", Int8(), 64, {}, "float, AVX2"),
        # Few rows pay for rounding the activation, but not for decoding weights first.
        ("AVX2", Int8(), 10, {}, "int16, AVX2"),
        ("AVX2", NF4(), 10, ROUNDED, "int16, AVX2"),
        ("AVX2", NF4(), 11, {}, "float, AVX2"),
        ("AVX2", Binary(), 5, {}, "int16, AVX2"),
        ("AVX2", Binary(), 6, {}, "float, AVX2"),
        ("AVX2", NF4(), 1, EXACT, "float, AVX2"),
        ("AVX2", NF4(), 1, {"contract_rows": True}, "float, AVX2"),
        ("AVX-512", NF4(), 1, {}, "float, AVX-512"),
        # Two and four blocks share a register of codes; blocks of 24 bytes do not.
        ("AVX2", NF4(block_size=32), 1, {}, "int16, AVX2"),
        ("AVX2", NVFP4(), 1, {}, "int16, AVX2"),
        # Small integers are multiplied as bytes if activations may be rounded to them.
        ("AVX2", NVFP4(), 1, ROUNDED, "int8, AVX2"),
        ("AVX2", Int4(), 10, ROUNDED, "int8, AVX2"),
        ("AVX2", Int4(), 11, ROUNDED, "float, AVX2"),
        ("AVX2", Ternary(), 1, ROUNDED, "int8, AVX2"),
        ("AVX2", Int6(), 1, ROUNDED, "int16, AVX2"),
        ("AVX2", Int4(), 1, {}, "int16, AVX2"),
        ("AVX-512", Int4(), 1, ROUNDED, "float, AVX-512"),
        ("AVX2", NF4(block_size=48), 1, {"size": 96}, "float, AVX2"),
        ("AVX-512", Int8(), 64, {"precision": "default"}, None),
        ("AVX-512", Int8(), 512, {}, "float, AVX-512"),
        ("AVX-512", Int8(), 5000, {}, "float, AVX-512"),
        ("AVX-512", Int8(), 64, {"contract_rows": True}, "float, AVX-512"),
        ("AVX2", Int8(), 17, {"contract_rows": True}, "float, AVX2"),
        ("VNNI", Int8(), 1000, {}, "int8x2, VNNI"),
        ("VNNI", Int8(), 9000, {"contract_rows": True}, "int16, VNNI"),
        # Rounding a large activation pays only for many rows of the weight.
        ("VNNI", Int8(), 4095, {"rows": 256}, "int8x2, VNNI"),
        ("VNNI", Int8(), 4096, {"rows": 256}, "float, AVX-512"),
        ("VNNI", NF4(), 4096, {"rows": 256}, "float, AVX-512"),
        ("VNNI", NF4(), 4096, {"rows": 257}, "int16, VNNI"),
        ("AVX-512", NF4(), 9000, {"contract_rows": True}, "float, AVX-512"),
        # Decoding to int16 costs as much as several rows of float products.
        ("VNNI", Int8(), 7, {**SMALL, "contract_rows": True}, "float, AVX-512"),
        ("VNNI", Int8(), 8, {**SMALL, "contract_rows": True}, "int16, VNNI"),
        ("VNNI", NF4(), 8, {**SMALL, "contract_rows": True}, "int16, VNNI"),
        ("VNNI", Int3(), 15, {**SMALL, "contract_rows": True}, "float, AVX-512"),
        ("VNNI", Int3(), 16, {**SMALL, "contract_rows": True}, "int16, VNNI"),
        ("VNNI", Binary(), 2, {**SMALL, "contract_rows": True}, "float, AVX-512"),
        ("VNNI", Binary(), 3, {**SMALL, "contract_rows": True}, "int16, VNNI"),
        ("VNNI", NF4(), 11, {"contract_rows": True}, "float, AVX-512"),
        ("VNNI", NF4(), 12, {"contract_rows": True}, "int16, VNNI"),
        ("VNNI", NF4(), 12, {**ROUNDED, "contract_rows": True}, "int16, VNNI"),
        ("VNNI", NF4(), 64, {**EXACT, "contract_rows": True}, "float, AVX-512"),
        # Tiles serve both directions, any number of rows, and small weights.
        ("AMX", Int8(), 5, {"contract_rows": True}, "float, AVX-512"),
        ("AMX", Int8(), 6, {"contract_rows": True}, "int8x2, AMX"),
        ("AMX", Int8(), 5, {**ROUNDED, "contract_rows": True}, "int8, AMX"),
        ("AMX", Binary(), 2, {"contract_rows": True}, "float, AVX-512"),
        ("AMX", Binary(), 3, {"contract_rows": True}, "int8x2, AMX"),
        ("AMX", NF4(), 5, {"contract_rows": True}, "float, AVX-512"),
        ("AMX", NF4(), 6, {"contract_rows": True}, "int8x2, AMX"),
        ("AMX", NF4(), 4, {**ROUNDED, "contract_rows": True}, "int8, AMX"),
        ("AMX", NF4(), 64, {**EXACT, "contract_rows": True}, "float, AVX-512"),
        ("AMX", Int8(), 9999, {**TINY, "contract_rows": True}, "int8x2, AMX"),
        # Activations are rounded to int8 once, after the multiplication by scales.
        ("AMX", Int8(), 64, {"x_dtype": INT8}, "int8, AMX"),
        ("AMX", Int8(), 64, {"x_dtype": INT8, "contract_rows": True}, "int8, AMX"),
        # FP8 uses lookups; in blocks each value is decoded separately.
        ("AMX", FP8(), 4, {}, "float, AVX-512"),
        ("AMX", FP8(), 5, {}, "int8x2, AMX"),
        ("AMX", FP8(block_size=64), 12, {}, "float, AVX-512"),
        ("AMX", FP8(block_size=64), 13, {}, "int8x2, AMX"),
        ("AMX", FP8(), 6, {"contract_rows": True}, "int8x2, AMX"),
        ("AMX", FP8(), 65, {"x_dtype": BF16, "weight_dtype": BF16}, "int8x2, AMX"),
        # Blocks of eight bytes have tables, two per register.
        ("AMX", NVFP4(), 9, {}, "int8x2, AMX"),
        ("AMX", NVFP4(), 6, {"contract_rows": True}, "int8x2, AMX"),
        ("AMX", Int8(), 3, {}, "int8x2, VNNI"),
        ("AMX", Int8(), 4, {}, "int8x2, AMX"),
        # Codes that are decoded first need more rows.
        ("AMX", Binary(), 6, {}, "int8x2, VNNI"),
        ("AMX", Binary(), 8, {"precision": "default"}, "int8, VNNI"),
        ("AMX", Binary(), 4096, {"precision": "default"}, "int8, AMX"),
        # int8 activations.
        ("VNNI", Int8(), 3, {"x_dtype": INT8}, "int8, VNNI"),
        ("AMX", NF4(), 4, {"precision": "default"}, "int8, AMX"),
        ("AMX", NF4(), 3, {"precision": "default"}, "int16, VNNI"),
        # One or two rows are not worth decoding a weight for all rows.
        ("AMX", NF4(), 2, {"precision": "default"}, "int8, VNNI"),
        ("VNNI", NF4(), 1, {"precision": "default"}, "int8, VNNI"),
        ("VNNI", NF4(), 1, {"precision": "default", "size": 64}, "float, AVX-512"),
        ("VNNI", Int6(), 2, {"precision": "default"}, "int8, VNNI"),
        ("VNNI", Int6(), 3, {"precision": "default"}, "int16, VNNI"),
        ("VNNI", Int6(), 2, {}, "int8x2, VNNI"),
        ("VNNI", Int6(), 3, {}, "int16, VNNI"),
        # Codes of 8 bits in long blocks are not rounded.
        ("VNNI", Int8(block_size=128), 11, {}, "int16, VNNI"),
        ("VNNI", Int8(block_size=128), 12, {}, "int8x2, VNNI"),
        ("VNNI", Int8(block_size=128), 12, {"rows": 64}, "int16, VNNI"),
        ("VNNI", Int8(block_size=64), 12, {}, "int16, VNNI"),
        ("VNNI", Int8(block_size=128), 12, {"precision": "default"}, "int16, VNNI"),
        ("VNNI", Trellis(bits=3), 4096, {}, "int8x2, VNNI"),
        ("VNNI", MXFP4(), 1, {}, "int8x2, VNNI"),
        ("VNNI", NF4(), 1, {}, "int16, VNNI"),
        ("VNNI", Int2(), 1, {}, "int16, VNNI"),
        ("AMX", NF4(), 4096, {}, "int8x2, AMX"),
        ("AMX", NF4(), 65, {"x_dtype": BF16, "weight_dtype": BF16}, "bfloat16, AMX"),
        ("AMX", NF4(), 65, {"x_dtype": BF16}, "int8x2, AMX"),
        ("AMX", NF4(), 7, {}, "int16, VNNI"),
        ("VNNI", NF4(), 16, {"precision": "default"}, "int8, VNNI"),
        ("VNNI", NF4(), 15, {"precision": "default"}, "int16, VNNI"),
        # A block of 4 bytes is too small for int16 vectors.
        ("VNNI", NF4(block_size=24), 4, {"size": 96}, "float, AVX-512"),
        ("VNNI", FP8(), 65, {"contract_rows": True}, "float, AVX-512"),
        # Blocks of 12 bytes do not divide a vector.
        ("VNNI", NF4(block_size=24), 65, {"size": 96, "contract_rows": True}, None),
        # Rounding the activation needs more rows of the weight.
        ("VNNI", NF4(), 64, {"rows": 256, "size": 256}, "float, AVX-512"),
        ("VNNI", NF4(), 47, {"rows": 256, "size": 256}, "int16, VNNI"),
        ("VNNI", NF4(), 2048, {"rows": 256}, "int16, VNNI"),
        ("VNNI", Int4(), 1024, {"rows": 256}, "float, AVX-512"),
        ("VNNI", Int4(), 1023, {"rows": 256}, "int16, VNNI"),
        ("VNNI", NVFP4(), 256, {"rows": 256}, "float, AVX-512"),
        ("VNNI", NVFP4(), 255, {"rows": 256}, "int16, VNNI"),
        ("VNNI", Int4(), 64, {"rows": 384, "size": 384}, "float, AVX-512"),
        ("VNNI", NF4(), 64, {"rows": 384, "size": 384}, "int16, VNNI"),
        ("VNNI", Binary(), 2048, {"rows": 256}, "float, AVX-512"),
        ("VNNI", Binary(), 2048, {}, "int8x2, VNNI"),
        # Tiles have 8 rows of the weight.
        ("VNNI", Int4(), 1, {"rows": 8}, "int8x2, VNNI"),
        ("VNNI", Int4(), 1, {"rows": 7}, "float, AVX-512"),
        ("AVX2", NF4(), 1, {"rows": 8}, "int16, AVX2"),
        ("AVX2", NF4(), 1, {"rows": 7}, "float, AVX2"),
        # int16 has no advantage here.
        ("i8mm", NF4(), 7, {"precision": "default"}, "float, NEON"),
        ("i8mm", NF4(), 8, {"precision": "default"}, "int8, i8mm"),
        ("dotprod", Int8(), 1000, {}, "int8x2, dotprod"),
    ],
)
def test_where_one_kernel_ends(name, format, m, how, expected, on):
    on(name)
    args, matmul = product(format, m, **how)
    found = matmul.of(*args)
    assert name_of(found) == expected
    why = why_not(found)
    if expected is None:
        assert f"for {m} rows XLA is faster than the native kernels" in why
    elif format.block_size is None or format.block_size >= 32:
        assert why is None


@pytest.mark.parametrize(
    "format, m, rows, size, expected",
    [
        (NF4(), 257, 1024, 1024, None),
        (NF4(), 256, 1024, 1024, "float, AVX-512"),
        (Int3(), 512, 1024, 1024, "float, AVX-512"),
        # The rounded operands of XLA exceed the caches.
        (NF4(), 1024, 256, 4096, "float, AVX-512"),
        (NF4(), 2048, 4096, 256, "float, AVX-512"),
    ],
)
def test_rounding_by_xla_pays_for_many_rows_of_large_weights(
    format, m, rows, size, expected, on, monkeypatch
):
    on("AVX-512")
    library = _choose.load()._replace(bfloat16=True)
    monkeypatch.setattr(_choose, "load", lambda: library)
    how = {"rows": rows, "size": size, "contract_rows": True, "precision": "default"}
    args, matmul = product(format, m, **how)
    assert name_of(matmul.of(*args)) == expected
    args, matmul = product(format, m, **how | {"precision": "high"})
    assert name_of(matmul.of(*args)) == "float, AVX-512"


def test_bfloat16_is_not_rounded_to_itself(on):
    on("AMX")
    how = {"x_dtype": BF16, "weight_dtype": BF16}
    args, matmul = product(NF4(), 64, **how)
    assert "not rounded" in described_by(matmul.of(*args))
    args, matmul = product(NF4(), 4, **how)
    assert "16 bits" in described_by(matmul.of(*args))


def test_why_there_is_none(on, monkeypatch):
    on("AMX")
    wide = product(NF4(), 4, weight_dtype=jnp.dtype("float64"))
    short = product(Int4(block_size=8), 4)
    for (args, matmul), expected in (
        (wide, "in float32 at most, not in float64"),
        (product(NF4(), 0), "nothing to multiply"),
        (short, "blocks of 8 are shorter than a register"),
    ):
        assert expected in why_not(matmul.of(*args))
    monkeypatch.setattr(_choose, "load", lambda: "without native kernels: a reason")
    args, matmul = product(MXFP4(), 4)
    assert why_not(matmul.of(*args)) == "without native kernels: a reason"


@pytest.mark.slow
def test_every_rule_serves_a_product_on_some_cpu():
    """No rule is hidden by the rules before it."""
    formats = [*FORMATS, Int3(), Int4(block_size=None), FP8(block_size=64), NVFP4()]
    formats += [Int8(block_size=8), NF4(block_size=24), NF4(block_size=32), Ternary()]
    shapes = [(256, 256), (256, 4096), (4096, 256), (300, 512), (300, 528)]
    shapes += [(1024, 4096), (1024, 64)]
    cpus = [frozenset((X86 | ARM)[name] for name in names) for names in SETS]
    cpus += [cpus[1] | {"bfloat16"}]
    ways = [(name, F32, F32) for name in PRECISIONS]
    ways += [("high", BF16, BF16), ("high", INT8, F32)]
    unserved = set(cpu.RULES)
    for format, (rows, size), contract_rows, (
        precision,
        x_dtype,
        dtype,
    ) in itertools.product(formats, shapes, (False, True), ways):
        compute = eqquant.kernels.Compute(precision)
        matmul = Matmul(format, contract_rows, compute, weight_dtype=dtype)
        columns = format.padded(size)
        codes = of_shape((rows, columns * format.bits // 8), format.code_dtype)
        scales = of_shape((rows, format.num_blocks(size)))
        for m in (1, 8, 16, 100, 200, 1000, 4100):
            x = of_shape((m, rows if contract_rows else columns), x_dtype)
            found = matmul.of(x, codes, scales)
            if cpu.why_unsupported(found) is None:
                unserved -= {cpu.rule_of(found, names) for names in cpus}
        if not unserved:
            return
    assert not unserved


@pytest.mark.parametrize("bits, most", [(2, 32), (3, 64), (4, 128)])
def test_a_linear_table_must_fit_the_lookup_of_its_codes(bits, most):
    """Native kernels would look up other levels of a larger table, and of a table
    without signs."""

    class Wide(Trellis):
        linear_table = LinearTable((1,) * bits, (0,) * (most + 1))

    class Uneven(Trellis):
        linear_table = LinearTable((1,) * bits, (1,) * 2**bits)

    assert _choose._is_known(Trellis(bits=bits))
    assert not _choose._is_known(Wide(bits=bits))
    assert not _choose._is_known(Uneven(bits=bits))
