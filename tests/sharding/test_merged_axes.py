"""Activations and weights with more than two axes, on meshes with explicit axes.

Products merge axes such as batch and sequence, or heads and features, which may be
split.
"""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from collectives import collectives
from eqquant import NF4
from eqquant.kernels.cpu import _library
from helpers import relative, slow, strict
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


SUMS = 1e-6  # Float32 sums in another order.
GATHERED = {("all-gather", "u8"), ("all-gather", "f32")}  # Codes and scales.
SUMMED = {("all-reduce", "f32")}
BATCH, LENGTH, HEADS, SIZE, OUT = 8, 4, 8, 64, 512


def matmul(x, w, **_):
    return x @ w.T


def mapped(x, w, **_):
    return jax.vmap(jax.vmap(lambda x: w @ x))(x)


def of_heads(x, w, **how):
    return strict(lambda x, w: jnp.einsum("bti,hdi->bthd", x, w, **how))(x, w)


def to_heads(x, w, **how):
    """Return a projection to heads."""
    return strict(lambda x, w: jnp.einsum("bthd,ohd->bto", x, w, **how))(x, w)


def from_rows(x, w, **how):
    return strict(lambda x, w: jnp.einsum("bthd,hdo->bto", x, w, **how))(x, w)


def experts(x, w, **_):
    return jax.vmap(lambda x, w: x @ w.T)(x, w)


ROWS, COLUMNS = (OUT, HEADS * SIZE), (HEADS, SIZE, OUT)
CASES = {
    # The function, the shape and spec of the weight, the spec of the activation, the
    # spec of the result, and the collectives.
    "sequences": (matmul, ROWS, P("m"), P("d", "e"), P("d", "e", "m"), set()),
    "sequences, contracted": (
        matmul,
        ROWS,
        P(None, "m"),
        P("d", "e", "m"),
        P("d", "e", None),
        SUMMED,
    ),
    "FSDP": (matmul, ROWS, P(("m", "d")), P("d", "e"), P("d", "e", "m"), GATHERED),
    "mapped": (mapped, ROWS, P("m"), P("d", "e"), P("d", "e", "m"), set()),
    "mapped, FSDP": (
        mapped,
        ROWS,
        P(("m", "d")),
        P("d", "e"),
        P("d", "e", "m"),
        GATHERED,
    ),
    "in heads": (
        of_heads,
        COLUMNS,
        P(None, "m"),
        P("d", "e"),
        P("d", "e", None, "m"),
        set(),
    ),
    "heads, contracted": (
        of_heads,
        COLUMNS,
        P("m", None, "e"),
        P("d", None, "e"),
        P("d", None, "m", None),
        SUMMED,
    ),
    "of heads": (
        to_heads,
        (OUT, HEADS, SIZE),
        P("e", "m"),
        P("d", None, "m"),
        P("d", None, "e"),
        SUMMED,
    ),
    "of heads, by rows": (
        from_rows,
        COLUMNS,
        P(None, "m"),
        P("d", "e", None, "m"),
        P("d", "e", None),
        SUMMED,
    ),
    "experts": (
        experts,
        (BATCH, OUT, SIZE),
        P("e", "m"),
        P("e", "d"),
        P("e", "d", None, "m"),
        set(),
    ),
}
FAST = ("sequences", "in heads", "of heads, by rows")


@pytest.mark.parametrize("name", [n if n in FAST else slow(n) for n in CASES])
def test_products(name, normal):
    fn, shape, spec, of_x, of_result, moved = CASES[name]
    kinds = (AxisType.Explicit,) * 3
    mesh = jax.make_mesh((2, 2, 2), ("d", "m", "e"), axis_types=kinds)
    lasts = {of_heads: (OUT,), matmul: (HEADS * SIZE,), mapped: (HEADS * SIZE,)}
    last = (SIZE,) if fn is experts else lasts.get(fn, (HEADS, SIZE))
    x = normal(BATCH, LENGTH, *last)
    if fn is experts:
        x = normal(BATCH, LENGTH, 2, *last)
    w = eqquant.quantize(normal(*shape), NF4(block_size=32), precision="highest")
    how = {"out_sharding": of_result}

    def gradient(x, w, **how):
        return jax.grad(lambda x: jnp.sum(fn(x, w, **how) ** 2))(x)

    expected = fn(x, w), gradient(x, w)
    split = eqquant.shard_tree(w, mesh, spec, batch="d")
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, of_x))
        run = jax.jit(lambda x, w: fn(x, w, **how)).lower(x, split).compile()
        got = run(x, split), jax.jit(lambda x, w: gradient(x, w, **how))(x, split)
    assert collectives(run) == moved
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < 5 * SUMS
    assert jax.typeof(got[0]).sharding.spec == of_result
    assert jax.typeof(got[1]).sharding == jax.typeof(x).sharding


def test_arrays_of_no_mesh_are_copied(normal, recwarn):
    q = eqquant.quantize(normal(OUT, SIZE), "nf4", precision="highest")
    x = normal(8, SIZE)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        run = jax.jit(matmul).lower(x, q).compile()
        got = run(x, q)
    assert relative(got, x @ q.T) < SUMS and not collectives(run)
    assert isinstance(_library.load(), str) or "eqquant_dot" in run.as_text()
    assert not [w for w in recwarn if "shard_tree" in str(w.message)]
