"""Errors of arrays and their components, and indexing that decodes."""

import dataclasses
import warnings

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant import NF4
from eqquant.kernels import TPUKernel


@pytest.fixture
def q(normal):
    return eqquant.quantize(normal(6, 128), "nf4")


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda q: q.transpose(0, 0), ValueError, "permutation of .0, 1."),
        (lambda q: q.transpose(0, 5), ValueError, "axis 5 is out of range .* 2 axes"),
        (lambda q: q[0:1].reshape(128).mT, ValueError, r"mT: .*\(128,\)"),
        (lambda q: q.reshape(5, 5), ValueError, r"cannot reshape \(6, 128\)"),
        (lambda q: q[..., 0, ...], IndexError, "only one Ellipsis"),
        (lambda q: q[0, 0, 0], IndexError, "too many indices"),
        (lambda q: q[6], IndexError, "6 is out of bounds for an axis of size 6"),
        (lambda q: q[0.5], TypeError, "indexed by integers"),
        (lambda q: np.asarray(q), TypeError, "use `.dequantize\\(\\)`"),
    ],
)
def test_bad_calls(call, error, message, q):
    with pytest.raises(error, match=message):
        call(q)


@pytest.mark.parametrize(
    "index",
    [
        (slice(None, None, -1),),
        (slice(None), jnp.array([3, 70])),
        (jnp.array([1, 4]), slice(3, 9)),
        (jnp.array([1, 4]), None, slice(None)),
        (slice(None), slice(3, 40)),
        (slice(1, 3), 5),
    ],
    ids=repr,
)
def test_indices_that_cut_blocks_decode(index, q):
    expected = q.dequantize()[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eqquant.arrays.MaterialiseWarning)
        actual = q[index]
    assert isinstance(actual, jax.Array)
    assert (actual == expected).all() and actual.shape == expected.shape


def test_components_that_do_not_fit(q, untyped):
    with pytest.raises(ValueError, match=r"leading axes \(6,\) of codes, got \(5,\)"):
        eqquant.arrays.from_components(q.codes, q.scales[:5], "nf4")


def test_the_primitive_multiplies_floats(q):
    x = jnp.ones((3, 128), int)
    with pytest.raises(TypeError, match="x must be floating point, got int32"):
        eqquant.primitives.quantized_dot_p.bind(
            x,
            q.codes,
            q.scales,
            matmul=eqquant.kernels.Matmul(NF4()),
            plan=None,
            stored=jax.tree.structure(((q.scales, None), None)),
        )


def test_bad_kernels_and_primitives(untyped):
    with pytest.raises(ValueError, match="kernel is 'fast'.*'decode', 'general'"):
        TPUKernel(kernel="fast")
    with pytest.raises(ValueError, match="kernel is 'cuda'.*'triton'"):
        eqquant.kernels.GPUKernel(kernel="cuda")
    with pytest.raises(TypeError, match="check is 1.*bool"):
        eqquant.kernels.GPUKernel(check=1)
    with pytest.raises(TypeError, match="tpu is GPUKernel.*TPUKernel or None"):
        eqquant.kernels.Compute(tpu=eqquant.kernels.GPUKernel())
    with pytest.raises(TypeError, match="expected JAX primitives, got 'dot_general'"):
        eqquant.register("dot_general")


@dataclasses.dataclass(frozen=True, repr=False)
class Halves(eqquant.formats.Format):
    """A format with the levels 0.5 and 1, and without `nearest`."""

    name = "halves"
    bits = 1
    codebook = (0.5, 1.0)

    def encode(self, blocks, absmax, counts, limit):
        del counts, limit
        return (jnp.abs(blocks) > 0.75 * absmax[..., None]).astype(jnp.uint8), absmax


def test_a_format_that_cannot_be_given_scales(normal):
    w = normal(4, 64)
    values = eqquant.quantize(w, Halves()).dequantize()
    levels = np.asarray(values) / np.abs(w).max(-1, keepdims=True)
    assert set(np.unique(levels)) == {0.5, 1.0}
    with pytest.raises(ValueError, match="scales.*Halves"):
        eqquant.quantize(w, Halves(), scales=jnp.ones((4, 1)))


def test_quantized_scales_are_like_an_array(normal):
    scales = eqquant.quantize(normal(4, 5, 64), NF4(double_quantization=True)).scales
    floats = scales.astype(jnp.float32)
    assert (scales.shape, scales.ndim, scales.size) == (floats.shape, 3, floats.size)
    assert scales.nbytes == 2 * 4 * 5  # A code, and an exponent per 256 codes.


USES = {
    "product": lambda q: q @ jnp.ones(128),
    "dequantize": lambda q: q.dequantize(),
    "report": lambda q: eqquant.report(q),
    "a constant of a scan": lambda q: jax.lax.scan(
        lambda carry, x: (carry, q @ x), 0, jnp.ones((2, 128))
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_scales_that_a_cast_has_lost(use, factor, normal):
    w = jnp.array([[factor], [1.0], [0.0]]) * normal(3, 128)
    q = eqquant.quantize(w, "nf4")
    cast = lambda q: q.replace(scales=q.scales.astype("float16"))
    with pytest.raises(ValueError, match="float16, in which 2 of 6 .*cast_tree"):
        USES[use](cast(q))
    # A block of zeros has a scale of zero.
    USES[use](cast(q[1:]))


def test_the_scales_that_a_cast_has_lost_are_named(normal):
    q = eqquant.quantize(1e-9 * normal(3, 128), "nvfp4")
    cast = lambda a: a.astype("float16") if a.dtype == "float32" else a
    with pytest.raises(ValueError, match="must be float32, got float16, in which 24"):
        jax.tree.map(cast, q).dequantize()


@pytest.mark.parametrize("use", USES)
def test_codes_that_an_average_has_changed(use, q):
    mean = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, q, q)
    with pytest.raises(TypeError, match="an average has changed them.*dequantized"):
        USES[use](mean)
