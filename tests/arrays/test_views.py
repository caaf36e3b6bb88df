"""Views: layers of a stack that products read in place."""

import functools as ft
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from eqquant import Int4, NF4
from eqquant.primitives import unflatten
from eqquant.training import StraightThroughArray
from eqquant.trees import scan_layers
from helpers import (
    assert_identical,
    equations_of,
    large_copies,
    relative,
    slow,
    strict,
)
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


LAYERS, SIZE = 4, 128


def views_in(fn, *args) -> list[bool]:
    """Return whether each product of a function reads a stack in place."""
    found = []
    for eqn in equations_of(jax.make_jaxpr(fn)(*args), "quantized_dot"):
        _, codes, *parts = eqn.invars
        found.append(unflatten(codes, parts, eqn.params["stored"])[1] is not None)
    return found


def with_adapter(w):
    layer = eqx.tree_at(lambda x: x.weight, eqx.nn.Linear(2, 2, key=KEY), w)
    layer = eqx.tree_at(lambda x: x.bias, layer, None, is_leaf=lambda x: x is None)
    layer = eqquant.quantize_tree(layer, "nf4", progress=False)
    adapted = eqquant.lora_tree(layer, 4, key=KEY)
    return adapted.weight.replace(b=jnp.ones_like(adapted.weight.b))


def rotated(w):
    return eqquant.arrays.RotatedArray(eqquant.quantize(w, "nf4"), 64)


KEY = jax.random.key(0)
to = lambda format: ft.partial(eqquant.quantize, format=format)
KINDS = {
    "nf4": to("nf4"),
    "int8": to("int8"),
    "double": to(NF4(double_quantization=True)),
    "nvfp4": to("nvfp4"),
    "affine": to(Int4(affine=True, double_quantization=True)),
    "rotated": rotated,
    "lora": with_adapter,
    "straight through": lambda w: StraightThroughArray(w, eqquant.quantize(w, "nf4")),
}
SLOW_KINDS = {
    "fp8": to("fp8"),
    "mxfp4": to("mxfp4"),
    "int3": to("int3"),
    "ternary": to("ternary"),
    "int8 activations": lambda w: eqquant.quantize(w, "nf4", activations="int8"),
}


@pytest.fixture
def weight(normal):
    return normal(LAYERS, SIZE, SIZE) / 8


@pytest.fixture
def stack(weight):
    return eqquant.quantize(weight, "nf4")


@pytest.fixture
def x(normal):
    return normal(3, SIZE)


@pytest.mark.parametrize("kind", ["nf4", slow("double"), slow("lora")])
def test_layers_of_mapped_indices_are_read_in_place(kind, weight, normal):
    q, x, layers = KINDS[kind](weight), normal(2, 3, SIZE), jnp.array([2, 0])
    one = lambda q, x, i: x @ q[i].T
    fn = strict(jax.vmap(one, (None, 0, 0)))
    assert views_in(fn, q, x, layers) == [True]
    expected = jnp.stack(
        [strict(one)(q, *each) for each in zip(x, layers, strict=True)]
    )
    assert relative(fn(q, x, layers), expected) < 1e-6


def step(x, w):
    return jnp.tanh(x @ w.T), None


def by_slices(stack, x):
    """The layers one after the other. Outside of `quaxify`, `lax.scan` slices them."""
    return lax.scan(step, x, stack)[0]


def in_place(stack, x):
    return scan_layers(step, x, stack)[0]


dispatched = strict(lambda stack, x: lax.scan(step, x, stack)[0])


@pytest.mark.parametrize("kind", [*KINDS, *map(slow, SLOW_KINDS)])
def test_every_kind_of_array_is_read_in_place(kind, weight, x):
    """Results equal the results of slices, bit for bit."""
    stack = {**KINDS, **SLOW_KINDS}[kind](weight)
    expected = jax.jit(by_slices)(stack, x)
    for fn in (in_place, dispatched):
        assert_identical(jax.jit(fn)(stack, x), expected)
        assert views_in(fn, stack, x) == [True]
    assert views_in(by_slices, stack, x) == [False]


def test_layers_in_any_order(stack, x):
    """An index that is wrong by one changes the result."""
    expected = x
    for i in (3, 2, 1, 0):
        expected, _ = jax.jit(step)(expected, stack[i])
    reverse = jax.jit(lambda *args: scan_layers(step, x, stack, reverse=True)[0])
    assert relative(reverse(stack, x), expected) < 1e-6
    assert relative(jax.jit(in_place)(stack, x), expected) > 0.1


def by_index(stack, x):
    return lax.fori_loop(0, LAYERS, lambda i, x: step(x, stack[i])[0], x)


PROGRAMS = {
    "jit": lambda stack, x: jax.jit(by_index)(stack, x),
    "dynamic_index_in_dim": lambda stack, x: (
        x @ lax.dynamic_index_in_dim(stack, 2, keepdims=False).T
    ),
    "nested jit": lambda stack, x: lax.fori_loop(
        0, LAYERS, lambda i, x: jax.jit(step)(x, stack[i])[0], x
    ),
    "checkpoint": lambda stack, x: lax.fori_loop(
        0, LAYERS, lambda i, x: jax.checkpoint(step)(x, stack[i])[0], x
    ),
    "cond": lambda stack, x: lax.cond(
        x[0, 0] > 9, lambda w, x: x, lambda w, x: step(x, w)[0], stack[1], x
    ),
    "vmap": lambda stack, x: jax.vmap(lambda i, x: stack[i] @ x)(
        jnp.array([3, 0, 3]), x
    ),
    "frozen": lambda stack, x: x @ lax.stop_gradient(stack[1]).T,
    "shard_map": lambda stack, x: jax.shard_map(
        by_slices,
        mesh=jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,)),
        in_specs=(P(), P("d")),
        out_specs=P("d"),
    )(stack, x),
    "transposed": lambda stack, x: x @ stack[1],
    "einsum": lambda stack, x: jnp.einsum("ab,cb->ac", x, stack[1]),
    "other dtype": lambda stack, x: x @ stack[1].astype(jnp.bfloat16),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_under_quaxify(name, stack, x):
    fn = PROGRAMS[name]
    program = jax.jit(strict(fn))
    views = views_in(program, stack, x)
    assert views and all(views)
    assert relative(program(stack, x), fn(stack.dequantize(), x)) < 1e-2


def test_indexing_needs_no_wrapper(stack, x):
    fn = lambda stack, i, x: x @ stack[i].T
    program = jax.jit(fn)
    for i in (2, -1):
        assert_identical(program(stack, i, x), jax.jit(fn)(stack[i][None], 0, x))
    assert views_in(fn, stack, 2, x) == [True]
    # Constant indices also copy a slice, for example in unrolled layers.
    assert views_in(lambda stack, x: x @ stack[2].T, stack, x) == [True]


CHANGES = {
    "scaled": lambda w: 2 * w,
    "rows": lambda w: w[8:40],
    "reversed": lambda w: eqquant.quaxify(jnp.flip)(w, 0),
    "columns": lambda w: w[:, 64:],
    "reshaped": lambda w: w.reshape(16, 8, SIZE),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_layer_slices_it(name, stack):
    fn = lambda stack, i: CHANGES[name](stack[i])
    expected = CHANGES[name](stack[2])
    assert_identical(jax.jit(fn)(stack, 2), expected)
    y = jax.random.normal(KEY, (expected.shape[-1],))
    product = lambda stack, i: fn(stack, i) @ y
    assert views_in(product, stack, 2) == [False]


def test_a_view_never_leaves_its_function(stack, x):
    layer = jax.tree.map(lambda part: part[1], stack)
    assert stack[1].stack_view is None  # It would keep the whole stack alive.
    index = lambda stack, i: stack[i]
    for fn in (index, eqquant.quaxify(index)):
        assert jax.tree.structure(jax.eval_shape(fn, stack, 1)) == jax.tree.structure(
            layer
        )
        assert_identical(jax.jit(fn)(stack, 1), layer)
    body = lambda x, w: (step(x, w)[0], w)
    for scan in (scan_layers, eqquant.quaxify(lax.scan)):
        _, out = jax.jit(lambda stack, x: scan(body, x, stack))(stack, x)  # noqa: B023
        assert_identical(out, stack)
    carried = eqquant.quaxify(
        lambda stack: lax.fori_loop(0, LAYERS, lambda i, w: stack[i], stack[0])
    )
    assert_identical(jax.jit(carried)(stack), stack[3])


#
# Transformations
#


def transformed(fn):
    """Return a program for each transformation."""
    loss = lambda x, stack: jnp.sum(fn(stack, x) ** 2)
    both = lambda x: (x, jnp.ones_like(x))
    return {
        "grad": lambda stack, x: jax.grad(loss)(x, stack),
        "jvp": lambda stack, x: jax.jvp(ft.partial(fn, stack), *zip(both(x))),
        "vmap": lambda stack, x: jax.vmap(fn, (None, 0))(stack, jnp.stack([x, -x])),
        "vmap of grad": lambda stack, x: jax.vmap(jax.grad(loss), (0, None))(
            jnp.stack([x, -x]), stack
        ),
        "hessian times vector": lambda stack, x: jax.jvp(
            lambda x: jax.grad(loss)(x, stack), *zip(both(x))
        ),
    }


@pytest.mark.parametrize("name", transformed(in_place))
def test_transformations(name, stack, x):
    expected = jax.jit(transformed(by_slices)[name])(stack, x)
    for fn in (in_place, dispatched):
        program = transformed(fn)[name]
        assert_identical(jax.jit(program)(stack, x), expected)
        assert all(views_in(program, stack, x))


def test_checkpoints_that_save_everything(stack, x):
    policy = jax.checkpoint_policies.everything_saveable
    saves = jax.checkpoint(step, policy=policy)

    def gradient(fn):
        loss = lambda stack, x: jnp.sum(lax.scan(fn, x, stack)[0])
        return jax.jit(strict(jax.grad(loss, argnums=1)))(stack, x)

    assert relative(gradient(saves), gradient(step)) < 1e-6


@pytest.mark.parametrize("axis", [0, 1])
def test_ensembles(axis, normal, x):
    stacks = eqquant.quantize(normal(2, LAYERS, SIZE, SIZE) / 8, "nf4")
    members = [jax.jit(by_slices)(stacks[i], x) for i in range(2)]
    stacks = jax.tree.map(lambda part: jnp.moveaxis(part, 0, axis), stacks)
    ensemble = lambda fn: jax.vmap(fn, (axis, None))
    for fn in (in_place, dispatched):
        assert_identical(jax.jit(ensemble(fn))(stacks, x), jnp.stack(members))
        # Some versions of JAX move the mapped axis, and others slice.
        assert axis == 1 or views_in(ensemble(fn), stacks, x) == [True]


def test_a_layer_for_each_row(stack, x):
    chosen = jnp.array([3, 0, 3])
    by_row = lambda stack, chosen, x: jax.vmap(lambda i, x: stack[i] @ x)(chosen, x)
    rows = [stack[int(i)] @ row for i, row in zip(chosen, x, strict=True)]
    assert relative(jax.jit(by_row)(stack, chosen, x), jnp.stack(rows)) < 1e-6
    assert views_in(by_row, stack, chosen, x) == [True]


@pytest.mark.parametrize("kind", ["nf4", "affine scales", "lora"])
def test_gradients_of_parts(kind, weight, x):
    """The gradients of scales and adapters equal the gradients through slices."""
    make = KINDS | {"affine scales": to(Int4(affine=True))}
    stack = make[kind](weight)
    trained, frozen = eqx.partition(stack, eqx.is_inexact_array)

    def gradient(fn):
        loss = lambda trained, x: jnp.sum(fn(eqx.combine(trained, frozen), x) ** 2)
        return jax.jit(jax.grad(loss))(trained, x)

    expected = gradient(by_slices)
    for fn in (in_place, dispatched):
        assert_identical(gradient(fn), expected)


@pytest.mark.parametrize("remat", [False, True])
def test_the_backward_pass_keeps_no_codes(remat, stack, x):
    """Residuals hold the index of a layer, not its codes."""
    fn = jax.checkpoint(step) if remat else step
    loop = lambda stack, x: lax.scan(
        lambda x, i: fn(x, stack[i]), x, jnp.arange(LAYERS)
    )[0]
    programs = [
        strict(loop),
        strict(lambda stack, x: lax.scan(fn, x, stack)[0]),
        lambda stack, x: scan_layers(step, x, stack, remat=remat)[0],
    ]
    for program in programs:
        loss = lambda x, stack: jnp.sum(program(stack, x))  # noqa: B023
        gradient = jax.grad(loss)
        assert all(views_in(gradient, x, stack))
        jaxpr = jax.make_jaxpr(gradient)(x, stack)
        saved = [
            var.aval.dtype for eqn in equations_of(jaxpr, "scan") for var in eqn.outvars
        ]
        assert saved and jnp.uint8 not in saved
        expected = jax.grad(lambda x: jnp.sum(by_slices(stack, x)))(x)
        assert relative(jax.jit(gradient)(x, stack), expected) < 1e-6


#
# Views of views
#


def test_experts_of_a_layer(normal):
    """`ragged_dot` reads the expert of a layer in place."""
    stack = eqquant.quantize(normal(2, 3, SIZE, SIZE) / 8, "nf4")
    x, sizes = normal(6, SIZE), jnp.array([1, 0, 5])
    body = lambda x, w: (jnp.tanh(lax.ragged_dot(x, w.swapaxes(1, 2), sizes)), None)
    run = lambda stack, x: lax.scan(body, x, stack)[0]
    gradient = lambda stack, x: jax.grad(lambda x: jnp.sum(run(stack, x)))(x)
    for fn, products in ((run, 1), (gradient, 2)):
        expected = fn(stack.dequantize(), x)
        # Two to four products in a row, each within 1e-4.
        assert relative(jax.jit(strict(fn))(stack, x), expected) < 3e-4
        found = equations_of(jax.make_jaxpr(strict(fn))(stack, x), "quantized_dot")
        shapes = [product.invars[1].aval.shape for product in found]
        assert shapes == [(6, SIZE, SIZE // 2)] * products


def test_a_scan_inside_of_a_scan(normal, x):
    stack = eqquant.quantize(
        normal(2, 3, SIZE, SIZE) / 8, NF4(double_quantization=True)
    )
    outer = lambda scan: lambda x, ws: (scan(step, x, ws)[0], None)
    expected = jax.jit(lambda stack, x: lax.scan(outer(lax.scan), x, stack)[0])(
        stack, x
    )
    nested = lambda stack, x: scan_layers(outer(scan_layers), x, stack)[0]
    for fn in (nested, strict(lambda stack, x: lax.scan(outer(lax.scan), x, stack)[0])):
        assert_identical(jax.jit(fn)(stack, x), expected)
        jaxpr = jax.make_jaxpr(fn)(stack, x)
        (product,) = equations_of(jaxpr, "quantized_dot")
        assert product.invars[1].aval.shape == (6, SIZE, SIZE // 2)


def test_heads_of_a_cache(normal):
    """Batch axes after the layers stay batch axes."""
    cache = eqquant.quantize(normal(LAYERS, 3, 16, SIZE), "int8")
    queries = normal(3, SIZE)
    fn = lambda cache, i, q: jnp.einsum("hd,htd->ht", q, cache[i])
    got = jax.jit(strict(fn))(cache, 2, queries)
    assert relative(got, fn(cache.dequantize(), 2, queries)) < 1e-3
    assert views_in(strict(fn), cache, 2, queries) == [True]


#
# `scan_layers`
#


class Layer(eqx.Module):
    linear: eqx.nn.Linear
    activation: object = jnp.tanh

    def __call__(self, x):
        return self.activation(self.linear(x))


def test_a_module_with_functions(x):
    make = lambda key: Layer(eqx.nn.Linear(SIZE, SIZE, key=key))
    layers = eqx.filter_vmap(make)(jax.random.split(KEY, LAYERS))
    layers = eqquant.quantize_tree(layers, "int8", progress=False)
    run = eqx.filter_jit(
        lambda layers, x, **how: scan_layers(
            lambda x, layer: (jax.vmap(layer)(x), x[0]), x, layers, **how
        )
    )
    arrays, static = eqx.partition(layers, eqx.is_array)
    body = lambda x, w: (jax.vmap(eqx.combine(w, static))(x), x[0])
    assert_identical(
        run(layers, x), jax.jit(lax.scan, static_argnums=0)(body, x, arrays)
    )
    assert_identical(run(layers, x, unroll=2), run(layers, x))


def test_bad_layers(stack, weight):
    with pytest.raises(ValueError, match=r"one length of their first axis.*\[3, 4\]"):
        scan_layers(step, 0.0, {"a": stack, "b": jnp.ones(3)})
    with pytest.raises(ValueError, match="no arrays"):
        scan_layers(step, 0.0, ())
    blocked = eqquant.quantize(weight, "int8", axis=0)
    with pytest.raises(ValueError, match=r"layers\['w'\] is int8.*quantize another"):
        scan_layers(step, 0.0, {"w": blocked})


def test_explain_names_copies(stack, x):
    explain = ft.partial(eqquant.debug.explain, platform="cpu")
    if "native kernel '" not in explain(in_place, stack, x):
        pytest.skip("NATIVE KERNELS NOT RUN")
    assert "reads a stack of 4 in place" in explain(in_place, stack, x)
    assert "copies its weight out of a stack" in explain(by_slices, stack, x)
    assert "stack" not in explain(lambda w, x: x @ w.T, stack[0], x)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", [P(None, "m"), P(None, None, "m"), P(None, "d")])
def test_meshes(kind, spec, normal):
    """A mesh may split every axis of a stack except the layers. Devices read their part
    in place, unless it is gathered."""
    types = (getattr(AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=types)
    stack = eqquant.quantize(normal(LAYERS, SIZE, 256) / 8, "nf4")
    x = normal(4, 256)

    def run(stack, x, split=lambda x: x):
        body = lambda x, w: (split(jnp.tanh(jnp.tanh(x @ w.T) @ w)), None)
        return scan_layers(body, x, stack)[0]

    expected = run(stack, x)
    with jax.sharding.set_mesh(mesh):
        stack = eqquant.shard_tree(stack, mesh, spec, batch="d")
        x = jax.device_put(x, NamedSharding(mesh, P("d")))
        if kind == "Explicit":  # The carry keeps its type.
            run = ft.partial(run, split=lambda x: jax.sharding.reshard(x, P("d")))
        out = jax.jit(run)(stack, x)
        views = views_in(run, stack, x)
        explained = eqquant.debug.explain(run, stack, x, platform="tpu")
    # Each device rounds activations relative to its own largest value.
    assert relative(out, expected) < 2e-3
    assert views == [True] * 2
    assert ("in place" in explained) == ("d" not in spec)


@pytest.mark.parametrize("axis", [0, 1])
def test_ensembles_on_meshes_with_explicit_axes(axis, normal):
    """The mesh splits the members, or the rows of each member."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    stack = eqquant.quantize(normal(2, LAYERS, SIZE, SIZE) / 8, "nf4")
    x = normal(2, 4, SIZE)

    def run(stack, x, split=lambda x: x):
        return scan_layers(lambda x, w: (split(jnp.tanh(x @ w.T)), None), x, stack)[0]

    expected = jax.vmap(run)(stack, x)
    with jax.sharding.set_mesh(mesh):
        spec = P("d") if axis == 0 else P(None, None, "d")
        stack = eqquant.shard_tree(stack, mesh, spec)
        x = jax.device_put(x, NamedSharding(mesh, P("d") if axis == 0 else P()))
        split = lambda x: jax.sharding.reshard(x, P(None, None))
        out = jax.jit(jax.vmap(ft.partial(run, split=split)))(stack, x)
    assert relative(out, expected) < 2e-3


def test_nothing_is_decoded(stack, x):
    for fn in (in_place, dispatched, by_slices):
        eqquant.debug.assert_not_materialised(fn, stack, x)

    def decodes(x, w):
        return jnp.tanh(x @ w.dequantize().T), None

    with pytest.raises(eqquant.MaterialiseError):
        eqquant.debug.assert_not_materialised(
            lambda stack, x: scan_layers(decodes, x, stack)[0], stack, x
        )


def test_the_compiled_program_has_no_copies(normal):
    stack = eqquant.quantize(normal(3, 512, 512) / 8, "nf4")  # 128 kB a layer.
    x = normal(1, 512)
    text = lambda fn: jax.jit(fn).lower(stack, x).compile().as_text()
    if "eqquant_dot" not in text(in_place):
        pytest.skip("NATIVE KERNELS NOT RUN")
    assert large_copies(text(by_slices))
    assert not large_copies(text(in_place))
    assert not large_copies(text(dispatched))


def split_by_rows(fn, check_vma=True):
    mesh = jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=(P(), P("d")), out_specs=P("d"))
    return jax.shard_map(fn, mesh=mesh, check_vma=check_vma, **specs)


@pytest.mark.parametrize("kind", ["nf4", "int8", "lora"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_shard_map_read_in_place(kind, check_vma, weight, x):
    """JAX splits the derivative of a `shard_map` in two, which exchange the stack."""
    stack, split = KINDS[kind](weight), split_by_rows(by_slices, check_vma)
    gradient = jax.grad(lambda stack, x: split(stack, x).sum(), argnums=1)
    program = jax.jit(strict(gradient))
    views = views_in(program, stack, x)
    assert len(views) >= 2 and all(views)
    assert relative(program(stack, x), gradient(stack.dequantize(), x)) < 1e-2
    text = program.lower(stack, x).compile().as_text()
    if "eqquant_dot" not in text:
        pytest.skip("NATIVE KERNELS NOT RUN")
    assert not large_copies(text, weight[0].size // 2 - 1)  # The codes of a layer.


def test_gradients_of_shard_map_with_one_layer(stack, x):
    """The second half receives the codes of the layer, joined along the last axis."""
    split = split_by_rows(lambda stack, x: x @ stack[1].T)
    gradient = jax.grad(lambda stack, x: jnp.sin(split(stack, x)).sum(), argnums=1)
    result = jax.jit(strict(gradient))(stack, x)
    assert relative(result, gradient(stack.dequantize(), x)) < 1e-2


def over_shards(x_spec, w_spec, out_spec, remat=False, check_vma=True):
    """Return a loop over layers, each of which is a `shard_map`."""
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def part(x, w):
        y = x @ w.T
        return jnp.tanh(lax.psum(y, "m") if w_spec[-1:] == ("m",) else y)

    specs = dict(in_specs=(x_spec, w_spec), out_specs=out_spec)
    split = jax.shard_map(part, mesh=mesh, check_vma=check_vma, **specs)
    body = lambda x, w: (split(x, w), None)
    body = jax.checkpoint(body) if remat else body
    return lambda stack, x: lax.scan(body, x, stack)[0]


def check_gradient_of_loop(fn, stack, x):
    """Neither the jaxpr nor the compiled program has a copy of the codes of a layer, no
    weight is decoded, and the gradient is the gradient of the decoded stack."""
    gradient = jax.grad(lambda stack, x: fn(stack, x).sum(), argnums=1)
    program = jax.jit(strict(gradient))
    views = views_in(program, stack, x)
    assert len(views) >= 2 and all(views)
    jaxpr = jax.make_jaxpr(program)(stack, x)
    equations = [*equations_of(jaxpr, "scan"), *equations_of(jaxpr, "shard_map")]
    kept = {var.aval.dtype for eqn in equations for var in eqn.outvars}
    assert kept <= {jnp.dtype("float32"), jnp.dtype("int32")}
    # Results of the product with codes differ by 1e-2 if it rounds activations.
    assert relative(program(stack, x), gradient(stack.dequantize(), x)) < 3e-2
    text = program.lower(stack, x).compile().as_text()
    if "eqquant_dot" not in text:
        pytest.skip("NATIVE KERNELS NOT RUN")
    copies = large_copies(text, 512)  # Activations of all layers are larger.
    assert not [line for line in copies if re.search(r" = [us]8\[", line)]


@pytest.mark.parametrize("kind", [*KINDS, *map(slow, SLOW_KINDS)])
def test_loops_over_shard_map(kind, weight, normal):
    """The residuals of a layer hold its index. In transposed layers with one scale per
    row the parts of devices could not be joined."""
    stack, x = {**KINDS, **SLOW_KINDS}[kind](weight), normal(4, SIZE)
    check_gradient_of_loop(over_shards(P("d"), P(), P("d")), stack, x)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("check_vma", [True, slow(False)])
@pytest.mark.parametrize(
    "specs",
    [
        (P("d"), P(), P("d")),
        (P(), P("m"), P(None, "m")),
        (P(None, "m"), P(None, "m"), P()),
        (P(("d", "m")), P(), P(("d", "m"))),
    ],
)
def test_loops_over_shard_map_with_parts_of_layers(
    specs, remat, check_vma, weight, normal
):
    stack = eqquant.quantize(weight, "int8")
    fn = over_shards(*specs, remat, check_vma)
    check_gradient_of_loop(fn, stack, normal(4, SIZE))


def test_loops_over_shard_map_with_padding(normal):
    stack = eqquant.quantize(normal(LAYERS, 120, 120) / 8, "nf4")
    fn = over_shards(P("d"), P(), P("d"))
    gradient = jax.grad(lambda stack, x: fn(stack, x).sum(), argnums=1)
    x, program = normal(4, 120), jax.jit(strict(gradient))
    assert all(views_in(program, stack, x))
    assert relative(program(stack, x), gradient(stack.dequantize(), x)) < 1e-2


def test_loops_over_shard_map_equal_loops_in_shard_map(stack, x):
    step_by_rows = split_by_rows(lambda w, x: step(x, w)[0])
    loop = lambda stack, x: lax.scan(lambda x, w: (step_by_rows(w, x), None), x, stack)
    outside = lambda stack, x: loop(stack, x)[0].sum()
    inside = lambda stack, x: split_by_rows(by_slices)(stack, x).sum()
    gradients = [
        jax.jit(strict(jax.value_and_grad(fn, argnums=1)))(stack, x)
        for fn in (outside, inside)
    ]
    assert_identical(*gradients)


def test_no_cache_keeps_the_arrays_of_a_shard_map(stack, x):
    """The structure of a view, which `jax.jit` caches, contains no tracers."""
    step_by_rows = split_by_rows(jax.jit(lambda w, x: step(x, w)[0]))
    loop = lambda stack, x: lax.scan(lambda x, w: (step_by_rows(w, x), None), x, stack)
    with jax.checking_leaks():
        jax.jit(strict(jax.grad(lambda x: loop(stack, x)[0].sum())))(x)


@pytest.mark.parametrize("check_vma", [True, slow(False)])
@pytest.mark.parametrize("remat", [False, slow(True)])
def test_derivatives_outside_of_quaxify_copy_no_layer(check_vma, remat, stack, normal):
    """There JAX keeps the stack, at most, and not the codes of each layer."""
    fn, x = over_shards(P("d"), P(), P("d"), remat, check_vma), normal(4, SIZE)
    gradient = lambda fn: jax.grad(lambda stack, x: fn(stack, x).sum(), argnums=1)
    program = jax.jit(gradient(strict(fn)))
    expected = gradient(fn)(stack.dequantize(), x)
    assert relative(program(stack, x), expected) < 1e-2
    copies = large_copies(program.lower(stack, x).compile().as_text(), 512)
    assert not [line for line in copies if re.search(r" = u8\[", line)]


def test_derivatives_of_derivatives_of_shard_map(stack, normal):
    fn, x = over_shards(P("d"), P(), P("d")), normal(4, SIZE)
    gradient = jax.grad(lambda stack, x: jnp.sin(fn(stack, x)).sum(), argnums=1)
    product = lambda stack, x: jax.jvp(lambda x: gradient(stack, x), (x,), (x,))[1]
    assert all(views_in(strict(product), stack, x))
    result = jax.jit(strict(product))(stack, x)
    assert relative(result, product(stack.dequantize(), x)) < 1e-2


def test_a_result_of_shard_map_that_is_an_operand(stack, x):
    """Inside of a loop it stays outside of the `shard_map`. A user receives an
    array."""
    mesh = jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,))
    transpose = jax.shard_map(
        lambda w: w.T, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    body = lambda x, w: (x, transpose(w))
    fn = lambda stack, x: lax.scan(body, x, stack)[1]
    expected = jnp.swapaxes(stack.dequantize(), 1, 2)
    with pytest.raises(eqquant.MaterialiseError, match="shard_map"):
        strict(fn)(stack, x)
    result = eqquant.quaxify(fn, on_materialise="allow")(stack, x)
    assert_identical(result, expected)


def test_a_plan_that_shard_map_does_not_follow(normal):
    """A view would gather the whole stack rather than one layer."""
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    stack = eqquant.quantize(normal(LAYERS, SIZE, SIZE) / 8, "nf4")
    x = normal(4, SIZE)
    expected = jax.jit(by_slices)(stack, x)
    for spec, in_place in ((P(), True), (P(None, "d"), False)):
        split = eqquant.shard_tree(stack, mesh, spec)
        program = jax.jit(strict(over_shards(P("d"), P(), P("d"))))
        assert views_in(program, split, x) == [in_place]
        assert relative(program(split, x), expected) < 2e-3


def test_loops_return_stacks(stack, x):
    """A loop that returns its layers returns the stack, and the scales keep their
    gradients, except behind `stop_gradient`."""

    def loss(scales, change):
        scan = lambda q: lax.scan(lambda x, w: (step(x, w)[0], change(w.T)), x, q)[1]
        ys = strict(scan)(eqx.tree_at(lambda q: q.scales, stack, scales))
        assert isinstance(ys, eqquant.QuantizedArray)
        return (ys.dequantize() ** 2).sum()

    for change, flows in ((lambda w: w, True), (lax.stop_gradient, False)):
        gradient = jax.grad(loss)(stack.scales, change)
        assert bool(gradient[2].any()) == flows
