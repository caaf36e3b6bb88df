"""`RotatedArray`: the values and products of a weight that is stored rotated."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.arrays import hadamard, hadamard_block, RotatedArray
from helpers import assert_close, assert_identical, relative, strict
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from scipy.linalg import hadamard as sylvester


# Float32 rounding of products and transforms.
ROUNDING = 2e-6


def make(w, block=64, format="nf4") -> RotatedArray:
    return RotatedArray(eqquant.quantize(hadamard(w, -1, block), format), block)


@pytest.mark.parametrize("size, block", [(48, 16), (256, 256)])
def test_the_transform_is_that_of_the_matrix(size, block, normal):
    assert hadamard_block(size) == block
    x = normal(3, size)
    matrix = np.kron(np.eye(size // block), sylvester(block)) / np.sqrt(block)
    assert relative(hadamard(x, -1, block), np.asarray(x) @ matrix) < ROUNDING
    there = hadamard(x.T, 0, block)
    assert relative(hadamard(there, 0, block), x.T) < ROUNDING


def test_products_are_those_of_the_decoded_array(normal):
    w, x = make(normal(32, 64)), normal(5, 64)
    dense = np.asarray(w.dequantize())
    assert relative(x @ w.T, x @ dense.T) < 1e-4  # 15-bit activations.
    assert relative(w @ x[0], dense @ x[0]) < 1e-4
    y = normal(5, 32)
    assert relative(y @ w, y @ dense) < 1e-4  # Rotates the result.
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(x @ w.T)))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(x @ dense.T)))(x)
    assert relative(gradient, expected) < 1e-3
    product = strict(lambda w, x: jnp.einsum("oi,bi->bo", w, x))
    assert relative(jax.jit(product)(w, x), x @ dense.T) < 1e-4


def test_structure_is_that_of_the_array(normal):
    w = make(normal(4, 3, 128))
    dense = w.dequantize()
    same = lambda a, b: assert_close(a, b, ROUNDING)
    decoded = lambda w: w.dequantize() if isinstance(w, RotatedArray) else w
    for fn in (
        lambda w: w[1],
        lambda w: w[1, 2],
        lambda w: w[jnp.array([3, 0])],
        lambda w: w[..., 64:],
        lambda w: w.transpose(2, 0, 1),
        lambda w: w.reshape(12, 128),
        lambda w: w * 2,
    ):
        same(decoded(fn(w)), fn(dense))
    assert isinstance(w[..., 64:], RotatedArray)
    with pytest.warns(eqquant.arrays.MaterialiseWarning):  # Within a block.
        whole = make(normal(4, 128), 128)
        same(whole[:, :64], whole.dequantize()[:, :64])
    joined = strict(lambda w: jnp.concatenate([w, w]))(w)
    same(joined.dequantize(), jnp.concatenate([dense, dense]))
    new = normal(4, 128)
    put = strict(lambda w, new: w.at[:, 1].set(new))(w, new)
    same(put.dequantize()[:, 1], make(new).dequantize())


def test_it_is_split_between_blocks(normal):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = make(normal(8, 1024))
    assert w.split_specs(P(None, "x"), mesh).base.codes == P(None, "x")
    assert make(normal(8, 1024), 256).split_specs(P(None, "x"), mesh) is NotImplemented


def test_dequantize_and_is_quantized(normal):
    w = make(normal(4, 64))
    assert eqquant.is_quantized(w)
    assert_identical(eqquant.dequantize(w), w.dequantize())
    incomplete = jax.tree.map(lambda _: None, w)
    assert not eqquant.is_quantized(incomplete)
    with pytest.raises(TypeError, match="eqx.combine"):
        eqquant.dequantize(incomplete)


@pytest.mark.slow
def test_stacked_layers_in_a_scan(normal):
    keys = jax.random.split(jax.random.key(0), 3)
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 64, key=key))(keys)
    stack = eqquant.quantize_tree(stack, "nf4", rotate=True)

    @eqx.filter_jit
    def run(stack, x):
        arrays, static = eqx.partition(stack, eqx.is_array)
        body = lambda h, arrays: (jax.vmap(eqx.combine(arrays, static))(h), None)
        return lax.scan(body, x, arrays)[0]

    x = normal(4, 64)
    assert relative(run(stack, x), run(eqquant.dequantize_tree(stack), x)) < 1e-4


@pytest.mark.slow
def test_saved_adapted_and_reported(normal, tmp_path):
    model = eqx.nn.Linear(96, 64, key=jax.random.key(0))
    q = eqquant.quantize_tree(model, "nf4", rotate=True)
    assert q.weight.block == 32 and repr(q.weight) == "rotated[32](nf4:f32[64,96])"
    row, _ = eqquant.report(q, model).rows
    assert row.format == eqquant.NF4() and row.sqnr > 18
    assert_identical(eqquant.dequantize_tree(q).weight, q.weight.dequantize())
    eqquant.debug.assert_trainable(eqx.filter(q, eqquant.trainable_mask(q)))
    adapted = eqquant.lora_tree(q, 4, key=jax.random.key(1))
    eqquant.save(tmp_path / "model.safetensors", adapted)
    loaded = eqquant.load(tmp_path / "model.safetensors", like=adapted)
    assert eqx.tree_equal(loaded, adapted)
    x = normal(96)
    assert_identical(loaded(x), adapted(x))
    merged = eqquant.merge_lora(adapted)
    assert relative(merged.weight, q.weight.dequantize()) < ROUNDING


def test_outliers_are_spread():
    w = np.random.default_rng(0).standard_t(2, size=(64, 128)).astype(np.float32)
    errors = [
        eqquant.report(
            eqquant.quantize_tree({"w": w}, None, rules={"w": "int4"}, rotate=rotate),
            {"w": w},
        )
        .rows[0]
        .relative_error
        for rotate in (False, True)
    ]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("rotate, block", [(16, 16), (128, 32), (True, 32)])
def test_the_block_of_a_rotation_is_at_most_a_number(rotate, block):
    model = eqx.nn.Linear(96, 64, key=jax.random.key(0))
    q = eqquant.quantize_tree(model, "nf4", rotate=rotate)
    basis = np.kron(np.eye(96 // block), sylvester(block)) / np.sqrt(block)
    expected = eqquant.quantize(model.weight @ basis, "nf4").dequantize() @ basis
    assert q.weight.block == block
    assert relative(q.weight.dequantize(), expected) < ROUNDING
    trained = eqquant.FakeQuantized(model, "nf4", rotate=rotate)
    assert eqx.tree_equal(trained.quantized(), q)


@pytest.mark.parametrize("rotate", [-2, 0, 1, 24])
def test_blocks_of_rotations_are_powers_of_two(normal, rotate):
    match = f"rotate must be True, False or .*, got {rotate}"
    with pytest.raises(ValueError, match=match):
        eqquant.quantize_tree({"w": normal(4, 64)}, rules={"w": "int8"}, rotate=rotate)
    with pytest.raises(ValueError, match=match):
        eqquant.trees.quantize_cache(normal(4, 64), "int8", rotate=rotate)


def test_an_axis_of_odd_size_is_not_rotated(normal):
    q = eqquant.quantize_tree(
        {"table": normal(64, 63)}, None, rules={"table": "int8"}, rotate=True
    )
    assert isinstance(q["table"], eqquant.QuantizedArray)


def test_an_empty_array_is_not_rotated():
    q = eqquant.quantize_tree(
        {"table": jnp.zeros((0, 64))}, None, rules={"table": "int8"}, rotate=True
    )
    assert isinstance(q["table"], eqquant.QuantizedArray)
    assert q["table"].dequantize().shape == (0, 64)
