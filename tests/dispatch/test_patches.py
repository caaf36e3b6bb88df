"""Patches of convolutions, by all implementations."""

import eqquant
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.dispatch.rules import _patches
from helpers import slow, strict
from jax import lax


# Input shape, window, strides and dilation.
CASES = {
    "overlapping": ((2, 3, 7, 6), (3, 2), (1, 1), (1, 1)),
    "strides": ((1, 2, 9, 8), (3, 3), (2, 3), (1, 1)),
    "dilated": ((1, 2, 9, 8), (2, 3), (1, 2), (3, 2)),
    "gaps": ((1, 2, 11), (2,), (4,), (1,)),
    "side by side": ((2, 3, 8, 7), (4, 3), (4, 3), (1, 1)),
    "of one element": ((2, 3, 4), (1,), (1,), (1,)),
    "larger than the input": ((1, 2, 2, 5), (3, 3), (1, 1), (1, 1)),
}


def reference(x, window, strides, dilation):
    """Return the patches by NumPy, with the positions last."""
    extents = [(k - 1) * d + 1 for k, d in zip(window, dilation, strict=True)]
    if any(n < m for n, m in zip(x.shape[2:], extents, strict=True)):
        places = [
            max(0, (n - m) // s + 1)
            for n, m, s in zip(x.shape[2:], extents, strides, strict=True)
        ]
        return np.zeros((*x.shape[:2], *window, *places), x.dtype)
    axes = tuple(range(2, x.ndim))
    seen = np.lib.stride_tricks.sliding_window_view(x, extents, axes)
    n = len(window)
    by_stride = (slice(None, None, s) for s in strides)
    seen = seen[(slice(None), slice(None), *by_stride)]
    seen = seen[(..., *(slice(None, None, d) for d in dilation))]
    return np.moveaxis(seen, range(2, 2 + n), range(-n, 0))


FAST = ("overlapping", "dilated", "larger than the input")


@pytest.mark.parametrize("name", [x if x in FAST else slow(x) for x in CASES])
def test_patches_are_copies(name):
    shape, *how = CASES[name]
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    expected = reference(x, *how)
    ways = [_patches.patches_of, _patches._by_index, _patches._by_shift]
    if expected.size:
        ways.append(_patches._by_lax)
    for way in ways:
        how_of = how if way is _patches.patches_of else [tuple(how)]
        got = jax.jit(lambda x: way(x, *how_of))(x)  # noqa: B023
        np.testing.assert_array_equal(got, expected)
    # The gradient of an element is the number of its copies; small integers are exact.
    seen = lambda x: jnp.sum(_patches.patches_of(x, *how) * (1 + expected % 7))
    gradient = np.zeros(x.size, np.float32)
    np.add.at(gradient, expected.astype(int).ravel(), (1 + expected % 7).ravel())
    np.testing.assert_array_equal(jax.grad(seen)(x), gradient.reshape(shape))


def test_infinities_stay_in_their_window(normal):
    """Zero times infinity is NaN, so a one-hot product would fail."""
    kernel = eqquant.quantize(normal(4, 2, 3), "int8", axis=(1, 2))
    x = jnp.abs(normal(1, 2, 12)).at[0, 0, 5].set(jnp.inf)
    fn = lambda w, x: lax.conv_general_dilated(x, w, (1,), "VALID")
    out = np.asarray(strict(fn)(kernel, x))
    assert np.isfinite(out[..., :3]).all() and np.isfinite(out[..., 6:]).all()
    assert not np.isfinite(out[..., 3:6]).any()


def test_gradient_of_a_mapped_convolution_with_an_empty_result(normal):
    kernel = eqquant.quantize(normal(4, 2, 3), "int8", axis=(1, 2))
    fn = strict(lambda w, x: lax.conv_general_dilated(x, w, (1,), "VALID"))
    total = lambda x: jnp.sum(jax.vmap(lambda x: fn(kernel, x))(x))
    np.testing.assert_array_equal(jax.grad(total)(normal(3, 1, 2, 2)), 0)
