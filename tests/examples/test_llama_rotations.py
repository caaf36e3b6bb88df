"""Rotations that are folded into the weights of the model of examples/llama."""

import pathlib
import sys

import eqquant
import jax
import jax.numpy as jnp
import pytest
from eqquant.calibration import fold_rotations


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "llama"
sys.path.insert(0, str(EXAMPLE))

from config import Config  # noqa: E402
from model import Decoder, unstack  # noqa: E402


TOKENS = jnp.arange(12).reshape(2, 6)


def forward(model, tokens):
    return model(tokens)


def decoder(layers=2, **options) -> Decoder:
    """Return a small model whose norms have various gains."""
    sizes = {"vocabulary": 64, "size": 96, "heads": 4, "kv_heads": 2}
    sizes |= {"head_size": 32, "hidden": 160, "layers": layers}
    model = Decoder(Config(**sizes, **options), key=jax.random.key(0))

    def changed(path, leaf):
        if "norm" not in jax.tree_util.keystr(path):
            return leaf
        return leaf + jax.random.normal(jax.random.key(1), leaf.shape) / 4

    return jax.tree_util.tree_map_with_path(changed, model)


def left(found) -> list[str]:
    return [row.path for row in found.rows if row.block is None]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_key_value_bias": True, "output_bias": True},
        {"query_key_norm": True, "norm_offset": 1.0},
        {"experts": 4, "active_experts": 2},
    ],
)
def test_only_the_rotations_behind_activation_functions_are_left(options):
    found = fold_rotations(forward, decoder(**options), TOKENS)
    assert len(left(found)) == 1 and left(found)[0].endswith("down.weight")


def test_layers_apart_and_checkpoints():
    run = lambda model, tokens: model(tokens, remat=True)
    found = fold_rotations(run, unstack(decoder()), TOKENS)
    assert left(found) == [f"layers.{i}.mlp.down.weight" for i in range(2)]


def test_with_a_tied_embedding_the_rotation_of_values_is_folded():
    found = fold_rotations(forward, decoder(tied=True), TOKENS)
    assert found.rotate == {"layers.attention.output.weight": False, "*": True}
    assert "embedding.weight, which is used with and without a gain" in str(found)
    assert "1 of 8 rotations are folded" in str(found)


def test_norms_behind_layers_keep_the_basis_of_the_residual():
    options = {"post_norms": True, "scale_embedding": True}
    found = fold_rotations(forward, decoder(**options), TOKENS)
    assert found.rotate == {"layers.attention.output.weight": False, "*": True}
    assert "layers.attention_post_norm.weight, which is no factor" in str(found)


@pytest.mark.slow
def test_quantized_models_run_without_the_folded_rotations():
    model = unstack(decoder(layers=1))
    found = fold_rotations(forward, model, TOKENS)
    texts = [jax.random.randint(jax.random.key(2), (8, 25), 0, 64)]
    stats = eqquant.calibrate(forward, found.model, texts)
    q = eqquant.quantize_tree(
        found.model, "int8", calibration=stats, rotate=found.rotate
    )
    is_rotated = lambda x: isinstance(x, eqquant.arrays.RotatedArray)
    leaves = jax.tree.leaves(q, is_leaf=is_rotated)
    # The embedding is read by lookups.
    assert [x.shape for x in leaves if is_rotated(x)] == [
        model.embedding.weight.shape,
        model.layers[0].mlp.down.weight.shape,
    ]
    run = eqquant.quaxify(forward, on_materialise="error")
    # INT8 changes weights by at most 1/254 of the largest of a block.
    expected = forward(model, TOKENS)
    assert jnp.abs(run(q, TOKENS) - expected).max() < 0.05 * jnp.abs(expected).max()
    rules = eqquant.allocate(found.model, 10**6, ["int8"], stats, rotate=found.rotate)
    assert len(rules) == len(stats.weights)
