"""Products compiled for TPU meshes: kernels and collectives."""

import os
import re

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import collectives, largest_float
from eqquant.debug._compile import _libtpu_environment
from helpers import kernels_in, large_copies, needs_compiler, slow
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P


SIZE = 1024


def mesh_of(name, kind):
    for variable, value in _libtpu_environment.items():
        os.environ.setdefault(variable, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    devices = np.array(topology.devices).reshape(2, 4)
    return Mesh(devices, ("d", "m"), axis_types=(kind,) * 2)


def compiled(fn, mesh, *args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).compile()


def weights(mesh, *specs):
    make = lambda: eqquant.quantize(jnp.ones((SIZE, SIZE), jnp.bfloat16), "nf4")
    q = eqx.filter_eval_shape(make)
    return [eqquant.shard_tree(q, mesh, spec, batch="d") for spec in specs]


def activation(mesh):
    sharding = NamedSharding(mesh, P("d"))
    return jax.ShapeDtypeStruct((64, SIZE), jnp.bfloat16, sharding=sharding)


@needs_compiler
@pytest.mark.parametrize("chip", ["v5e:2x4", slow("v6e:2x4")])
@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
def test_every_device_has_kernels(chip, kind):
    mesh = mesh_of(chip, kind)
    a, b, c = weights(mesh, P("m"), P(None, "m"), P(("m", "d")))
    program = compiled(
        lambda x, *w: x @ w[0].T @ w[1].T @ w[2].T, mesh, activation(mesh), a, b, c
    )
    assert kernels_in(program) == ["nf4_decode"] * 3
    found = collectives(program)
    # Scales are floats, one for 64 weights; the sum is over activations.
    assert {dtype for op, dtype in found if op == "all-gather"} == {"u8", "f32"}
    assert "all-reduce" in dict(found)
    assert largest_float(program) < SIZE * SIZE / 8


@needs_compiler
@pytest.mark.parametrize("dtype, part", [("bfloat16", "bf16"), ("float32", "f32")])
def test_kernels_round_their_parts_of_a_sum(dtype, part):
    mesh = mesh_of("v5e:2x4", AxisType.Auto)
    (w,) = weights(mesh, P(None, "m"))
    x = activation(mesh)
    x = jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    program = compiled(lambda x, w: x @ w.T, mesh, x, w)
    (kernel,) = re.findall(r"%nf4_decode\S* = (\w+)\[", program.as_text())
    assert kernel == part
    assert dict.fromkeys(collectives(program)) == {("all-reduce", part): None}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5e:2x4", "v6e:2x4"])
def test_gradients_have_kernels(chip):
    mesh = mesh_of(chip, AxisType.Auto)
    a, b = weights(mesh, P(("m", "d")), P("d", "m"))
    loss = lambda x, *w: jnp.sum(jnp.tanh(x @ w[0].T) @ w[1].T).astype(jnp.float32)
    program = compiled(jax.grad(loss), mesh, activation(mesh), a, b)
    assert len(kernels_in(program)) == 3  # The value of the last product is unused.
    assert {d for op, d in collectives(program) if op == "all-gather"} == {"u8", "f32"}
    assert largest_float(program) < SIZE * SIZE / 8


@needs_compiler
@pytest.mark.slow
def test_scattered_sums_and_scales_in_eight_bits():
    mesh = mesh_of("v5e:2x4", AxisType.Auto)
    format = eqquant.NF4(double_quantization=True)
    make = lambda: eqquant.quantize(jnp.ones((SIZE, SIZE), jnp.bfloat16), format)
    q = eqx.filter_eval_shape(make)
    split = eqquant.shard_tree(q, mesh, P("d", "m"), batch="d", scatter=-2)
    program = compiled(lambda x, w: x @ w.T, mesh, activation(mesh), split)
    assert kernels_in(program) == ["nf4_decode"]
    assert collectives(program) == {("all-gather", "u8"), ("reduce-scatter", "f32")}


@needs_compiler
def test_rows_of_a_vocabulary_are_looked_up_where_they_are():
    mesh = mesh_of("v5e:2x4", AxisType.Auto)
    (table,) = weights(mesh, P("m"))
    tokens = jax.ShapeDtypeStruct(
        (32,), jnp.int32, sharding=NamedSharding(mesh, P("d"))
    )
    program = compiled(lambda tokens, q: q[tokens], mesh, tokens, table)
    assert {op for op, _ in collectives(program)} == {"all-reduce"}
    assert largest_float(program) <= 32 * SIZE


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("chip", ["v5e:2x4", slow("v6e:2x4")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layers_are_read_in_the_part_of_each_device(chip, kind):
    """Only a weight that is gathered (the last) is copied out of its stack."""
    mesh = mesh_of(chip, kind)
    split = lambda x: x
    if kind is AxisType.Explicit:  # The carry keeps its type.
        split = lambda x: jax.sharding.reshard(x, P("d"))
    make = lambda: eqquant.quantize(jnp.ones((4, SIZE, SIZE), jnp.bfloat16), "nf4")
    q = eqx.filter_eval_shape(make)
    shard = lambda *spec: eqquant.shard_tree(q, mesh, P(None, *spec), batch="d")

    def run(x, *stacks):
        step = lambda x, w: (split(jnp.tanh(jnp.tanh(x @ w[0].T) @ w[1].T)), None)
        return eqquant.trees.scan_layers(step, x, stacks)[0]

    args = activation(mesh), shard("m"), shard(None, "m")
    program = compiled(run, mesh, *args)
    assert kernels_in(program) == ["nf4_decode"] * 2
    part = SIZE * SIZE // 2 // 4  # Bytes.
    assert not large_copies(program.as_text(), part - 1)
    gathered = compiled(run, mesh, activation(mesh), shard(("m", "d")), args[2])
    assert large_copies(gathered.as_text(), part // 2 - 1)
    assert ("all-gather", "u8") in collectives(gathered)
