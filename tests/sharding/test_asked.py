"""Requested result shardings on meshes with explicit axes: scattered sums, and
gathered activations or weights."""

import eqquant
import jax
import jax.numpy as jnp
import pytest
from collectives import collectives
from eqquant import Int4, NF4
from helpers import pairs, relative, slow, strict
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


SUMS = 2e-6  # Float32 sums in another order, differentiated.
SMALL_BLOCKS = {"block_size": 32}
EXACT = {"precision": "highest"}
BATCH, LENGTH, IN, OUT = 4, 8, 512, 256
SCATTER, SUM, GATHER = (
    {(op, "f32")} for op in ("reduce-scatter", "all-reduce", "all-gather")
)
CODES = {("all-gather", "u8")}

# The specs of the weight (rows are outputs), of the activation (batch, length, in) and
# of the result. Then the collectives of the product, and those of its gradient.
CASES = {
    "tokens scattered": (
        P(None, "m"),
        P("d", None, "m"),
        P("d", "m", None),
        SCATTER,
        GATHER,
    ),
    "outputs scattered": (
        P(None, "m"),
        P("d", None, "m"),
        P("d", None, "m"),
        SCATTER,
        GATHER,
    ),
    "summed": (P(None, "m"), P("d", None, "m"), P("d", None, None), SUM, set()),
    "tokens gathered": (
        P("m", None),
        P("d", "m", None),
        P("d", None, "m"),
        GATHER,
        SCATTER,
    ),
    "weight gathered": (
        P("m", None),
        P("d", "m", None),
        P("d", "m", None),
        CODES | GATHER,
        set(),
    ),
    "FSDP, tokens scattered": (
        P(None, ("m", "d")),
        P("d", None, "m"),
        P("d", "m", None),
        CODES | GATHER | SCATTER,
        set(),
    ),
}


def with_adapter(w):
    model = {"weight": eqquant.quantize(w, NF4(**SMALL_BLOCKS), **EXACT)}
    w = eqquant.lora_tree(model, 4, key=jax.random.key(0))["weight"]
    return w.replace(b=jax.random.normal(jax.random.key(1), w.b.shape) / 8)


# Other permitted collectives. The sums of an adapter are small, and offsets have
# separate all-reduces.
KINDS = {
    "nf4": (lambda w: eqquant.quantize(w, NF4(**SMALL_BLOCKS), **EXACT), set()),
    "scales in 8 bits": (
        lambda w: eqquant.quantize(
            w, NF4(double_quantization=True, **SMALL_BLOCKS), **EXACT
        ),
        GATHER,  # Scales have no collective.
    ),
    "offsets": (
        lambda w: eqquant.quantize(w, Int4(affine=True, **SMALL_BLOCKS), **EXACT),
        SUM,
    ),
    "adapter": (with_adapter, SUM),
}


def run_on_mesh(fn, x, w, spec, of_x):
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    w = eqquant.shard_tree(w, mesh, spec, batch="d")
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, of_x))
        run = jax.jit(fn).lower(x, w).compile()
        return run(x, w), collectives(run)


@pairs("name, kind, by_rows", CASES, KINDS, [False, True])
def test_what_is_asked_for(name, kind, by_rows, normal):
    spec, of_x, of_out, moved, moved_back = CASES[name]
    make, more = KINDS[kind]
    w = make(normal(IN, OUT) if by_rows else normal(OUT, IN))
    x = normal(BATCH, LENGTH, IN)
    equation = "bti,io->bto" if by_rows else "bti,oi->bto"
    if by_rows:
        spec = P(*reversed(spec))

    def fn(x, w, **how):
        return strict(lambda x, w: jnp.einsum(equation, x, w, **how))(x, w)

    def asked(x, w):
        return fn(x, w, out_sharding=of_out)

    def gradient(product):
        return jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2))

    out, found = run_on_mesh(asked, x, w, spec, of_x)
    assert found - more == moved - more
    assert jax.typeof(out).sharding.spec == of_out
    assert relative(out, fn(x, w)) < SUMS
    back, found = run_on_mesh(gradient(asked), x, w, spec, of_x)
    assert found - more <= (moved | moved_back | GATHER) - more
    assert jax.typeof(back).sharding.spec == of_x
    assert relative(back, gradient(fn)(x, w)) < SUMS


@pytest.mark.parametrize("outside", [False, slow(True)])
def test_mapped_and_in_a_loop(outside, normal):
    """Two layers, the first split by outputs and the second by its contracted axis."""
    up, down = (
        eqquant.quantize(normal(2, *shape), NF4(**SMALL_BLOCKS), **EXACT)
        for shape in ((OUT, IN), (IN, OUT))
    )
    x = normal(BATCH, LENGTH, IN)

    def forward(x, up, down, *specs):
        hows = [{"out_sharding": spec} for spec in specs] or [{}, {}]

        def layer(x, ws):
            y = jnp.einsum("ti,oi->to", x, ws[0], **hows[0])
            return x + jnp.einsum("ti,oi->to", y, ws[1], **hows[1]) / 64, None

        layer = jax.checkpoint(layer)
        through = lambda x: jax.lax.scan(layer, x, (up, down))[0]
        return jax.vmap(through)(x)

    def loss(x, up, down, *specs):
        if outside:
            one = strict(lambda x, *ws: forward(x[None], *ws, *specs)[0])
            out = jax.vmap(lambda x: one(x, up, down))(x)
        else:
            out = strict(lambda *args: forward(*args, *specs))(x, up, down)
        return jnp.sum(out**2), out

    gradient = jax.grad(loss, has_aux=True)
    expected, value = gradient(x, up, down)
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)
    up = eqquant.shard_tree(up, mesh, P(None, "m"), batch="d")
    down = eqquant.shard_tree(down, mesh, P(None, None, "m"), batch="d")
    of_x = P("d", "m", None)
    specs = P(None, "m"), P("m", None)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, of_x))
        run = jax.jit(lambda *args: gradient(*args, *specs)).lower(x, up, down)
        run = run.compile()
        got, out = run(x, up, down)
    assert collectives(run) == SCATTER | GATHER
    assert jax.typeof(got).sharding.spec == of_x == jax.typeof(out).sharding.spec
    assert relative(out, value) < SUMS and relative(got, expected) < SUMS


def test_straight_through_arrays(normal):
    spec, of_x, of_out, *_ = CASES["tokens scattered"]
    x, w = normal(BATCH, LENGTH, IN), normal(OUT, IN)

    def gradients(x, w, **how):
        def loss(x, w):
            rules = {"w": NF4(**SMALL_BLOCKS)}
            model = {"w": w}
            w = eqquant.training.fake_quantize_tree(
                model, rules=rules, quantized_products=True, **EXACT
            )
            fn = strict(lambda x, w: jnp.einsum("bti,oi->bto", x, w, **how))
            return jnp.sum(fn(x, w["w"]) ** 2)

        return jax.grad(loss, (0, 1))(x, w)

    expected = gradients(x, w)
    asked = lambda x, w: gradients(x, w, out_sharding=of_out)
    got, found = run_on_mesh(asked, x, w, spec, of_x)
    assert found >= SCATTER
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) < SUMS
