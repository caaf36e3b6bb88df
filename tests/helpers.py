"""Helpers for several test files."""

import functools as ft
import importlib
import importlib.util
import itertools
import math
import pathlib
import re
import sys

import eqquant
import equinox as eqx
import jax
import numpy as np
import pytest
from eqquant._jax import has_gpu_compiler
from eqquant.formats._registry import formats
from eqquant.kernels import choose
from jax import export


# Formats that share a code path: with NF4 (blocked), or with ternary (per channel).
# Their distinct properties, such as three-bit codes, have separate tests.
SAME_PATH = (eqquant.Int4, eqquant.Int3, eqquant.Int2, eqquant.NF2, eqquant.NF3)
SAME_PATH += (
    eqquant.formats.Int6,
    eqquant.formats.Int5,
    eqquant.FP8,
    eqquant.MXFP4,
    eqquant.NVFP4,
)


# New formats are added automatically. Blocked and per-channel formats use different
# code paths. The excluded formats differ from others by numbers only, and have
# separate tests.
ALIKE = (eqquant.NF2, eqquant.formats.Int5, eqquant.Int3, eqquant.Int2, eqquant.MXFP4)
MAKERS = [make for make in formats.values() if make not in ALIKE]
DEFAULT_FORMATS = [make() for make in MAKERS]
# One format for each packing: three-bit codes are stored in two pieces.
KINDS = [f for f in DEFAULT_FORMATS if f.bits == 3 or not isinstance(f, SAME_PATH)]
# Formats whose scales may have any floating-point dtype.
SCALED = [make for make in MAKERS if not make().quantized_scales]
FORMATS = [*DEFAULT_FORMATS, eqquant.Binary(block_size=32)]
FORMATS += [eqquant.NF4(double_quantization=True)]
FORMATS += [
    make(block_size=32) for make in (eqquant.NF4, eqquant.Int8, eqquant.Ternary)
]
FORMATS += [
    eqquant.Int4(block_size=None),
    eqquant.formats.Codebook((-2, -0.5, 0, 0.5, 1)),
]


# Bounds on the relative error of a product, from the documented errors of
# `kernels/xla/` on normal data, with a margin for the small shapes of tests: float32
# rounding, 15-bit activations, and 8 bits for both operands.
TOLERANCE = {"highest": 3e-6, "high": 1e-4, "default": 2.5e-2}


# These products decode no weight in full.
strict = ft.partial(eqquant.quaxify, on_materialise="error")


def multiply_by(
    kernels, matmul, x, codes, scales, x_unit=None, interpret=False, view=None
):
    """Multiply by the first of `kernels` that serves the product."""
    product = matmul.of(x, codes, scales)
    kernel = choose(kernels, product)
    assert not isinstance(kernel, str), kernel
    views = {} if view is None else {"view": view}
    return kernel.lower(product, x, codes, scales, x_unit, interpret, **views)


def relative(actual, expected) -> float:
    """Return the Frobenius norm of the difference, relative to the expected array."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (norm if norm else 1))


def dense(tree):
    """Return the tree with every quantized array dequantized."""
    return eqquant.dequantize_tree(tree)


def assert_close(actual, expected, tolerance=TOLERANCE["high"]):
    """Check that leaves have equal shapes and dtypes, and close values."""
    actual, expected = jax.tree.leaves(dense(actual)), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) <= tolerance


def assert_identical(actual, expected):
    """Check that trees have the same structure, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def quantize_weights(layer, format):
    """Quantize every floating-point matrix of a layer, independently of
    `quantize_tree`."""
    return jax.tree.map(
        lambda x: (
            eqquant.quantize(x, format) if eqx.is_inexact_array(x) and x.ndim > 1 else x
        ),
        layer,
    )


def unpacked(q: eqquant.QuantizedArray) -> np.ndarray:
    """Return one code per element, unpacked by the documented layout."""
    codes = np.asarray(q.codes)
    bits = q.format.bits
    if bits == 8:
        return codes
    *lead, packed = codes.shape
    group = q.format.block_size or 64
    if bits in (3, 5, 6):  # The low bits of each group, then its high bits.
        low_bits = 2 if bits == 3 else 4
        groups = codes.reshape(*lead, -1, group * bits // 8)
        end = group * low_bits // 8
        planes = lambda x, bits: (
            (x[..., None, :] >> np.arange(0, 8, bits)[:, None]) % 2**bits
        )
        low, high = (
            planes(groups[..., :end], low_bits),
            planes(groups[..., end:], bits - low_bits),
        )
        flat = lambda x: x.reshape(*lead, packed * 8 // bits)
        return flat(low) + 2**low_bits * flat(high)
    planes = 8 // bits
    size = group // planes
    groups = codes.reshape(*lead, packed // size, 1, size)
    shifts = (np.arange(planes) * bits).reshape(planes, 1)
    return ((groups >> shifts) & (2**bits - 1)).reshape(*lead, packed * planes)


def in_blocks(w, block_size: int | None) -> np.ndarray:
    w = np.asarray(w, np.float64)
    return w.reshape(*w.shape[:-1], -1, block_size or w.shape[-1])


def sqnr(actual, expected) -> float:
    """Return the signal to quantization noise ratio, in decibels."""
    return -20 * math.log10(relative(actual, expected))


def exported(fn, *args):
    """Export `fn`, serialise it, read it back, and return the leaves of its result."""
    dynamic, static = eqx.partition(args, eqx.is_array)
    leaves, treedef = jax.tree.flatten(dynamic)

    def run(leaves):
        args = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return jax.tree.leaves(fn(*args))

    written = export.export(jax.jit(run))(leaves).serialize()
    return export.deserialize(written).call(leaves)


def load_benchmark(name):
    """Import a module of `benchmarks/static/` by its name."""
    folder = str(pathlib.Path(__file__).parent.parent / "benchmarks" / "static")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="NOT COMPILED FOR TPU: libtpu is missing (pip install libtpu)",
)

needs_gpu_compiler = pytest.mark.skipif(
    not (has_gpu_compiler() and importlib.util.find_spec("nvidia")),
    reason="NOT COMPILED FOR GPUS: the compiler is missing (make test-gpu-compiler)",
)


def equations_of(jaxpr, name: str | None):
    """Yield the equations of a primitive, or of all, also inside of other equations."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if name is None or eqn.primitive.name == name:
            yield eqn
        for param in eqn.params.values():
            for inner in param if isinstance(param, (tuple, list)) else [param]:
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations_of(inner, name)


def kernels_in(compiled) -> list[str]:
    """Return the names of the matmul kernels in a program, in order."""
    text = compiled.as_text()
    calls = re.findall(r"%([^\s.]+)\S* = .*custom_call_target=\"tpu_custom", text)
    around = ("spread", "split_planes", "join_planes", "round_rows")
    return [call for call in calls if call not in around]


def large_copies(text: str, limit: int = 2**16) -> list[str]:
    """Return the instructions of a program that copy more than `limit` bytes."""
    bits = {"pred": 8, "bf16": 16}
    found = []
    for line in text.splitlines():
        match = re.match(
            r"\s*(?:ROOT )?\S+ = (\w+)\[([\d,]*)\]\S* (copy|dynamic-slice|transpose)\(",
            line,
        )
        if match is None:
            continue
        kind = bits.get(match[1]) or int(re.sub(r"\D", "", match[1][:3]))
        if np.prod([int(n) for n in match[2].split(",") if n]) * kind // 8 > limit:
            found.append(line.strip())
    return found


class Interrupted(Exception):
    pass


def interrupt_after_saving(module, monkeypatch, run):
    """Run an example, and interrupt it after its first checkpoint."""
    save = module._checkpoint.save

    def save_and_stop(*args, **kwargs):
        save(*args, **kwargs)
        raise Interrupted

    with monkeypatch.context() as context:
        context.setattr(module._checkpoint, "save", save_and_stop)
        with pytest.raises(Interrupted):
            run()


def slow(value):
    """Mark one of several parameters of a test as slow."""
    return pytest.param(value, marks=pytest.mark.slow)


def fast(*names: str, formats=DEFAULT_FORMATS) -> list:
    """Mark all formats as slow except the named ones."""
    return [f if f.name in names else slow(f) for f in formats]


def _as_param(value):
    if isinstance(value, type(pytest.param())):
        return value
    # Their distinct properties have separate tests.
    is_slow = isinstance(value, (*SAME_PATH, eqquant.formats.Codebook))
    return slow(value) if is_slow else pytest.param(value)


def pairs(names: str, *options):
    """Parametrise a test over pairs of options.

    Each value of an option meets each value of every other option at least once. The
    full product has more combinations, but finds few additional faults. The first
    combinations, which contain each value once, are fast; the others are slow.
    """
    options = [[_as_param(x) for x in values] for values in options]
    product = list(itertools.product(*(range(len(values)) for values in options)))
    pairs_of = lambda row: set(itertools.combinations(enumerate(row), 2))
    values_left = set().union(*map(enumerate, product))
    pairs_left = set().union(*map(pairs_of, product))
    cases = []
    while pairs_left:
        row = max(
            product,
            key=lambda row: (
                len(values_left & set(enumerate(row))),
                len(pairs_left & pairs_of(row)),
            ),
        )
        marks = [] if values_left & set(enumerate(row)) else [pytest.mark.slow]
        values_left -= set(enumerate(row))
        pairs_left -= pairs_of(row)
        given = [values[i] for values, i in zip(options, row, strict=True)]
        case = [param.values[0] for param in given]
        marks += [mark for param in given for mark in param.marks]
        names_of = (str(getattr(value, "__name__", value)) for value in case)
        cases.append(pytest.param(*case, id="-".join(names_of), marks=marks))
    return pytest.mark.parametrize(names, cases)
