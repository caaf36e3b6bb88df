"""`quaxify`: the search for quantized arrays, products, structure."""

import functools as ft
from typing import NamedTuple

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant import Int8, NF4
from helpers import (
    assert_close,
    assert_identical,
    DEFAULT_FORMATS,
    dense,
    KINDS,
    pairs,
    slow,
    strict,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


def check(fn, *args, tolerance=1e-4):
    """Compare `fn` on quantized arrays with dense arrays. No array is decoded in
    full."""
    got = strict(fn)(*args)
    assert_close(got, jax.tree.leaves(fn(*dense(args))), tolerance)
    return got


def check_exact(fn, *args):
    """Like [`check`][], for structural functions, which are exact."""
    got = strict(fn)(*args)
    for a, b in zip(
        jax.tree.leaves(dense(got)), jax.tree.leaves(fn(*dense(args))), strict=True
    ):
        assert_identical(a, b)
    leaves = jax.tree.leaves(got, is_leaf=eqquant.is_quantized)
    return all(map(eqquant.is_quantized, leaves))


#
# The search for quantized arrays
#

KEY = jax.random.key(0)
# The method of the class, which needs the dispatcher.
CONV = eqx.nn.Conv2d(6, 8, 3, key=KEY)
CONV = eqx.tree_at(
    lambda conv: conv.weight,
    CONV,
    eqquant.quantize(CONV.weight, "nf4", axis=(1, 2, 3)),
)
IMAGES = jax.random.normal(KEY, (2, 6, 9, 9))


def global_function(images):
    return jax.vmap(CONV)(images)


def calls_global_function(images):
    return global_function(images)


def default_argument(images, conv=CONV):
    return jax.vmap(conv)(images)


class Holder:
    def __init__(self):
        self.conv = {"here": [CONV]}


class Model(eqx.Module):
    conv: eqx.nn.Conv2d

    def method(self, images):
        return jax.vmap(self.conv)(images)


class Pair(NamedTuple):
    conv: eqx.nn.Conv2d
    name: str

    def method(self, images):
        return jax.vmap(self.conv)(images)


def local_closure():
    conv = CONV
    inner = lambda images: jax.vmap(conv)(images)
    return lambda images: inner(images)


PLACES = {
    "vmap": jax.vmap(CONV),
    "vmap of vmap": lambda x: jax.vmap(jax.vmap(CONV))(x[None])[0],
    "jit": jax.jit(jax.vmap(CONV)),
    "filter_jit": eqx.filter_jit(eqx.filter_vmap(CONV)),
    "closure": local_closure(),
    "global": global_function,
    "global of a global": calls_global_function,
    "default argument": default_argument,
    "bound method": Model(CONV).method,
    "bound method of a tuple": Pair(CONV, "name").method,
    "partial": ft.partial(lambda convs, x: jax.vmap(convs["a"])(x), {"a": CONV}),
    "partial keyword": ft.partial(lambda x, conv: jax.vmap(conv)(x), conv=CONV),
    "eqx.Partial": eqx.Partial(lambda conv, x: jax.vmap(conv)(x), CONV),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_finds_quantized_arrays_wherever_they_are(place):
    expected = jax.vmap(dense(CONV))(IMAGES)
    with pytest.raises(TypeError):
        PLACES[place](IMAGES)
    fn = strict(PLACES[place])
    assert_close(fn(IMAGES), expected)
    assert_close(jax.jit(fn)(IMAGES), expected)


def test_arguments_of_all_kinds(normal):
    q, x = eqquant.quantize(normal(8, 64), "nf4"), normal(64)

    def fn(weights, *, more, scale, name):
        assert name == "name"
        return weights["a"][0] @ x * scale + more @ x, "static"

    out, static = strict(fn)({"a": [q]}, more=q, scale=2.0, name="name")
    assert static == "static"
    assert_close(out, 3 * (q.dequantize() @ x))


def test_outside_and_inside_of_transformations(normal):
    q, x = CONV, IMAGES
    loss = lambda conv, x: jnp.sum(jnp.sin(jax.vmap(conv)(x)))
    expected = jax.grad(loss, argnums=1)(dense(q), x)
    assert_close(jax.grad(lambda x: strict(loss)(q, x))(x), expected)
    assert_close(jax.jit(jax.grad(lambda x: strict(loss)(q, x)))(x), expected)
    with pytest.warns(eqquant.arrays.MaterialiseWarning, match="rev"):
        got = eqquant.quaxify(jax.grad(loss, argnums=1))(q, x)
    assert_close(got, expected)
    assert_close(jax.vmap(strict(q))(x), jax.vmap(dense(q))(x))


def test_nothing_quantized_is_no_work(normal):
    calls = []
    fn = lambda x: calls.append(0) or x
    x = normal(3)
    assert eqquant.quaxify(fn)(x) is x and len(calls) == 1


def test_metadata_is_kept():
    def named(x):
        "A docstring."

    assert eqquant.quaxify(named).__name__ == "named"
    assert eqquant.quaxify(named).__doc__ == "A docstring."


#
# Products
#


@pairs(
    "case, swap, default_format",
    [
        ("nk,bk->bn", (24, 64), (5, 64)),
        ("nk,bk->nb", (24, 64), (5, 64)),
        ("nk,bn->bk", (24, 64), (5, 24)),
        ("hnk,bk->bhn", (3, 24, 64), (5, 64)),
        ("hnk,bhk->bn", (3, 24, 64), (5, 3, 64)),
        ("hnk,bhk->bhn", (3, 24, 64), (5, 3, 64)),
        ("hnk,bn->bhk", (3, 24, 64), (5, 24)),
        ("hnk,bhn->bk", (3, 24, 64), (5, 3, 24)),
        ("hnk,bhn->bhk", (3, 24, 64), (5, 3, 24)),
        ("hnk,bhnk->b", (3, 24, 64), (5, 3, 24, 64)),
        ("hnk,b->bhnk", (3, 24, 64), (5,)),
        ("k,bk->b", (64,), (5, 64)),
    ],
    [False, True],
    KINDS,
)
def test_dot_general(case, swap, default_format, normal):
    spec, q_shape, x_shape = case
    q, x = eqquant.quantize(normal(*q_shape), default_format), normal(*x_shape)
    if swap:
        inputs, out = spec.split("->")
        spec = ",".join(reversed(inputs.split(","))) + "->" + out
    fn = lambda q, x: jnp.einsum(spec, *((x, q) if swap else (q, x)))
    check(fn, q, x)


@pytest.mark.parametrize("axis", [0, (0, 1), (1, 2)])
def test_dot_general_over_part_of_the_blocked_axes(axis, normal):
    q = eqquant.quantize(normal(4, 6, 64), "int8", axis=axis)
    check(lambda q, x: jnp.einsum("hnk,bk->bhn", q, x), q, normal(5, 64))


@pairs(
    "sizes, default_format",
    [[100, 0, 150, 50], [300, 0, 0, 0], [0, 0, 0, 7], [128, 128, 1, 43]],
    KINDS,
)
def test_ragged_dot(default_format, sizes, normal):
    q = eqquant.quantize(normal(4, 64, 32), default_format, axis=1)
    sizes = jnp.array(sizes)
    used = int(sizes.sum())
    fn = lambda q, x: lax.ragged_dot(x, q, sizes)[:used]
    check(fn, q, normal(300, 64))


def test_ragged_dot_over_another_axis_has_no_rule(normal):
    q, x, sizes = (
        eqquant.quantize(normal(4, 6, 4), "int8"),
        normal(8, 6),
        jnp.array([3, 0, 4, 1]),
    )
    numbers = lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [2])

    def fn(q, x):
        return lax.ragged_dot_general(x, q, sizes, numbers)

    with pytest.raises(eqquant.MaterialiseError):
        strict(fn)(q, x)


CONVOLUTIONS = {
    "valid": dict(window_strides=(1, 1), padding="VALID"),
    "same": dict(window_strides=(1, 1), padding="SAME"),
    "strides": dict(window_strides=(2, 1), padding=((1, 2), (0, 1))),
    "dilated": dict(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 1)),
    "transposed": dict(
        window_strides=(1, 1), padding=((2, 2), (1, 1)), lhs_dilation=(2, 2)
    ),
}


@pairs("how, default_format", CONVOLUTIONS, KINDS)
def test_convolutions(how, default_format, normal):
    kwargs = CONVOLUTIONS[how]
    q = eqquant.quantize(normal(8, 6, 3, 2), default_format, axis=(1, 2, 3))
    check(lambda q, x: lax.conv_general_dilated(x, q, **kwargs), q, normal(2, 6, 9, 8))


@pytest.mark.parametrize(
    "format", [eqquant.Int8(), eqquant.NF4(block_size=16)], ids=repr
)
def test_one_of_several_blocked_axes_of_a_stack(format, normal):
    q = eqquant.quantize(normal(3, 8, 4, 16), format, axis=(2, 3))
    fn = lambda q, x: jnp.einsum("sbk,soik->sboi", x, q)
    check(fn, q, normal(3, 2, 16))


def test_grouped_and_channels_last_convolutions(default_format, normal):
    q = eqquant.quantize(normal(8, 3, 3, 3), default_format, axis=(1, 2, 3))
    grouped = lambda q, x: lax.conv_general_dilated(
        x, q, (1, 1), "SAME", feature_group_count=2
    )
    check(grouped, q, normal(2, 6, 9, 9))
    depthwise = eqquant.quantize(normal(8, 1, 3, 3), default_format, axis=(1, 2, 3))
    each = lambda q, x: lax.conv_general_dilated(
        x, q, (1, 1), "SAME", feature_group_count=8
    )
    check(each, depthwise, normal(2, 8, 9, 9))
    last = eqquant.quantize(normal(3, 3, 6, 8), default_format, axis=(0, 1, 2))
    numbers = ("NHWC", "HWIO", "NHWC")
    fn = lambda q, x: lax.conv_general_dilated(
        x, q, (1, 1), "SAME", dimension_numbers=numbers
    )
    check(fn, last, normal(2, 9, 9, 6))


@pytest.mark.parametrize(
    "make", [eqx.nn.Conv1d, slow(eqx.nn.Conv3d), eqx.nn.ConvTranspose2d]
)
def test_convolution_layers(make, normal):
    layer = eqquant.quantize_tree(make(16, 24, 3, key=KEY), "int8")
    assert eqquant.is_quantized(layer.weight)
    check(lambda layer, x: layer(x), layer, normal(16, *[7] * layer.num_spatial_dims))


#
# Structure
#

MOVES = {
    "transpose": lambda q: q.T,
    "reshape": lambda q: q.reshape(4, 12, 64),
    "squeeze": lambda q: jnp.squeeze(q[None], 0),
    "broadcast": lambda q: jnp.broadcast_to(q, (3, 48, 64)),
    "slice": lambda q: q[3:9],
    "slice of blocks": lambda q: q[:, 32:],
    "strided slice": lambda q: q[::2],
    "split": lambda q: jnp.split(q, 3),
    "rev": lambda q: q[::-1],
    "concatenate": lambda q: jnp.concatenate([q, q]),
    "stack": lambda q: jnp.stack([q, q]),
    "astype": lambda q: q.astype(jnp.bfloat16),
    "copy": lambda q: jnp.copy(q),
    "select": lambda q: lax.select(jnp.array(True), q, q),
    "stop_gradient": lax.stop_gradient,
    "optimization_barrier": lax.optimization_barrier,
    "dynamic_slice": lambda q: lax.dynamic_slice(q, (jnp.array(5), 0), (7, 64)),
    "checkpoint_name": lambda q: checkpoint_name(q, "w"),
    "jit": lambda q: jax.jit(lambda q: q.T)(q),
}


@pairs("move, format", MOVES, [make(block_size=32) for make in (NF4, Int8)])
def test_moving_about_is_exact_and_stays_quantized(move, format, normal):
    q = eqquant.quantize(normal(48, 64), format)
    assert check_exact(MOVES[move], q)
    assert check_exact(jax.jit(MOVES[move]), q)


def test_gathers_decode_only_their_rows(default_format, normal):
    table = eqquant.quantize(normal(97, 64), default_format)
    stack = eqquant.quantize(normal(5, 48, 64), default_format)
    i = jnp.array([3, 1, 3])
    assert not check_exact(lambda q: q[i], table)
    assert not check_exact(lambda q: jnp.take(q, i[None], axis=0), table)
    assert not check_exact(lambda q: jax.vmap(lambda i: q[i])(i), table)
    assert not check_exact(lambda q: q[2], table)
    assert check_exact(lambda q: q[i], stack)
    eqquant.debug.assert_not_materialised(strict(lambda q: q[i]), table)


@pairs("spec, default_format", [P("x"), P(None, "x")], DEFAULT_FORMATS)
def test_placement(spec, default_format, normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    q = eqquant.quantize(normal(16, 512), default_format)
    sharding = NamedSharding(mesh, spec)
    assert check_exact(lambda q: lax.with_sharding_constraint(q, sharding), q)
    assert check_exact(lambda q: jax.device_put(q, sharding), q)
    placed = strict(jax.jit(lambda q: lax.with_sharding_constraint(q, sharding)))(q)
    assert placed.codes.sharding.is_equivalent_to(sharding, 2)


def test_a_closure_over_what_is_not_assigned_yet(normal):
    q, x = eqquant.quantize(normal(24, 64), "nf4"), normal(64)
    fn = lambda x: later if x is None else jnp.dot(q, x)
    out = strict(fn)(x)
    later = None
    assert_close(out, q.dequantize() @ x)
    assert fn(later) is None
