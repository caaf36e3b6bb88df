"""What several tests measure."""

import functools as ft
import importlib.util
import itertools
import math
import re

import eqquant
import equinox as eqx
import jax
import numpy as np
import pytest
from eqquant._jax import has_gpu_compiler
from eqquant.formats._registry import formats
from jax import export


# Those that take the path of another: of NF4 with blocks, or of ternary without.
# What is their own, as three bits are, has tests of its own.
SAME_PATH = (eqquant.Int4, eqquant.Int3, eqquant.Int2, eqquant.NF2, eqquant.NF3)
SAME_PATH += (eqquant.FP8, eqquant.MXFP4, eqquant.NVFP4)


# A new format is picked up here. Blocked and per channel are different paths. These
# differ from others by numbers alone, and are in tests of their own.
ALIKE = (eqquant.NF2, eqquant.Int3, eqquant.Int2, eqquant.MXFP4)
MAKERS = [make for make in formats.values() if make not in ALIKE]
DEFAULT_FORMATS = [make() for make in MAKERS]
# One of each way to pack: three bits are in two pieces.
KINDS = [f for f in DEFAULT_FORMATS if f.bits == 3 or not isinstance(f, SAME_PATH)]
# Those whose scales are floats of any dtype.
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


# Bounds on the relative error of a product, from what the recipes of `kernels/xla.py`
# promise on normal data, with room for the small shapes of tests: float32 rounding, 15
# bits of activations, 8 bits of both operands.
TOLERANCE = {"highest": 3e-6, "high": 1e-4, "default": 2.5e-2}


# None is decoded in full.
strict = ft.partial(eqquant.quaxify, on_materialise="error")


def relative(actual, expected) -> float:
    """Frobenius norm of the difference, relative to the expected."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    norm = np.linalg.norm(expected)
    return float(np.linalg.norm(actual - expected) / (norm if norm else 1))


def dense(tree):
    """The same with every quantized array dequantized."""
    return eqquant.dequantize_tree(tree)


def assert_close(actual, expected, tolerance=TOLERANCE["high"]):
    """Leaf by leaf: shapes and dtypes the same, values up to the tolerance."""
    actual, expected = jax.tree.leaves(dense(actual)), jax.tree.leaves(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative(a, b) <= tolerance


def assert_identical(actual, expected):
    """Bit by bit, dtypes and structure as well."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def quantize_weights(layer, format):
    """Every floating-point matrix of a layer, chosen by the tests themselves."""
    return jax.tree.map(
        lambda x: (
            eqquant.quantize(x, format) if eqx.is_inexact_array(x) and x.ndim > 1 else x
        ),
        layer,
    )


def unpacked(q: eqquant.QuantizedArray) -> np.ndarray:
    """Codes, one each, decoded here from the documented layout."""
    codes = np.asarray(q.codes)
    bits = q.format.bits
    if bits == 8:
        return codes
    *lead, packed = codes.shape
    group = q.format.block_size or 64
    if bits == 3:  # Two bits, then one, of each group.
        groups = codes.reshape(*lead, -1, group * 3 // 8)
        planes = lambda x, bits: (
            (x[..., None, :] >> np.arange(0, 8, bits)[:, None]) % 2**bits
        )
        low, high = (
            planes(groups[..., : group // 4], 2),
            planes(groups[..., group // 4 :], 1),
        )
        flat = lambda x: x.reshape(*lead, packed * 8 // 3)
        return flat(low) + 4 * flat(high)
    planes = 8 // bits
    size = group // planes
    groups = codes.reshape(*lead, packed // size, 1, size)
    shifts = (np.arange(planes) * bits).reshape(planes, 1)
    return ((groups >> shifts) & (2**bits - 1)).reshape(*lead, packed * planes)


def in_blocks(w, block_size: int | None) -> np.ndarray:
    w = np.asarray(w, np.float64)
    return w.reshape(*w.shape[:-1], -1, block_size or w.shape[-1])


def sqnr(actual, expected) -> float:
    """Signal to quantization noise ratio, in decibels."""
    return -20 * math.log10(relative(actual, expected))


def exported(fn, *args):
    """The leaves of `fn(*args)`, exported, written, read and called."""
    dynamic, static = eqx.partition(args, eqx.is_array)
    leaves, treedef = jax.tree.flatten(dynamic)

    def run(leaves):
        args = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return jax.tree.leaves(fn(*args))

    written = export.export(jax.jit(run))(leaves).serialize()
    return export.deserialize(written).call(leaves)


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="NOT COMPILED FOR TPU: libtpu is missing (pip install libtpu)",
)

needs_gpu_compiler = pytest.mark.skipif(
    not (has_gpu_compiler() and importlib.util.find_spec("nvidia")),
    reason="NOT COMPILED FOR GPUS: the compiler is missing (make test-gpu-compiler)",
)


def kernels_in(compiled) -> list[str]:
    """The names of the Pallas kernels that multiply, in order."""
    text = compiled.as_text()
    calls = re.findall(r"%([^\s.]+)\S* = .*custom_call_target=\"tpu_custom", text)
    around = ("spread", "split_planes", "join_planes", "round_rows")
    return [call for call in calls if call not in around]


class Interrupted(Exception):
    pass


def interrupt_after_saving(module, monkeypatch, run):
    """Run an example, but stop right after its first checkpoint."""
    save = module._checkpoint.save

    def save_and_stop(*args, **kwargs):
        save(*args, **kwargs)
        raise Interrupted

    with monkeypatch.context() as context:
        context.setattr(module._checkpoint, "save", save_and_stop)
        with pytest.raises(Interrupted):
            run()


def slow(value):
    """One of several parameters of a test, for the slow part."""
    return pytest.param(value, marks=pytest.mark.slow)


def fast(*names: str, formats=DEFAULT_FORMATS) -> list:
    """These formats, of which those so named are in the fast part."""
    return [f if f.name in names else slow(f) for f in formats]


def _as_param(value):
    if isinstance(value, type(pytest.param())):
        return value
    # What they have of their own is in tests of their own.
    is_slow = isinstance(value, (*SAME_PATH, eqquant.formats.Codebook))
    return slow(value) if is_slow else pytest.param(value)


def pairs(names: str, *options):
    """A decorator like `pytest.mark.parametrize`, for options that combine: each value
    of one meets each value of every other at least once. The whole product has more
    combinations, and finds next to nothing more. The first ones, in which each value
    occurs, are the fast ones.
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
