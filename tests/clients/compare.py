"""Compare a model of another library with its dequantized self."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
from helpers import assert_close
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path


def norm(x) -> float:
    return float(jnp.linalg.norm(x.ravel()))


def share(q) -> float:
    """Return the share of the bytes that `quantize_tree` quantized."""
    rows = eqquant.report(q).rows
    quantized = sum(row.bytes_before for row in rows if row.format is not None)
    return quantized / sum(row.bytes_before for row in rows)


def left(q) -> set[str]:
    """Return the paths of the arrays that stay in floating point."""
    return {row.path for row in eqquant.report(q).rows if row.format is None}


def check(
    model, call, *, format="int8", least=0.8, tolerance=1e-4, run=None, **options
):
    """Quantize a model, and compare `call(model)` with the dequantized model.

    At least the share `least` of the bytes must be quantized. Also compare the
    gradients of all arrays that stay in floating point. `run` transforms the call with
    quantized weights. Return the quantized model.
    """
    q = eqquant.quantize_tree(model, format, **options)
    assert share(q) >= least, (share(q), left(q))
    trainable = eqx.filter(q, eqquant.trees.trainable_mask(q))
    paths = {keystr(path) for path, _ in tree_leaves_with_path(trainable)}

    def outputs(call, model):
        is_trained = tree_map_with_path(lambda path, _: keystr(path) in paths, model)
        trained, frozen = eqx.partition(model, is_trained)

        @eqx.filter_jit
        @eqx.filter_value_and_grad(has_aux=True)
        def compute(trained, frozen):
            y = call(eqx.combine(trained, frozen))
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(y)), y

        (_, y), gradients = compute(trained, frozen)
        return y, {keystr(path): x for path, x in tree_leaves_with_path(gradients)}

    with jax.default_matmul_precision("highest"):
        y, gradients = outputs(call if run is None else run(call), q)
        expected, expected_gradients = outputs(call, eqquant.dequantize_tree(q))
    assert any(jnp.any(x != 0) for x in jax.tree.leaves(expected))
    assert_close(y, expected, tolerance)
    assert gradients.keys() == expected_gradients.keys()
    largest = max((norm(x) for x in expected_gradients.values()), default=0.0)
    for path, gradient in expected_gradients.items():
        # A bias before a norm has no influence: its gradient is the rounding of others.
        unit = max(norm(gradient), 1e-3 * largest)
        assert norm(gradients[path] - gradient) <= 10 * tolerance * unit, path
    return q
