"""Quantize a decoder in order, corrected for the inputs in the quantized model."""

from typing import Any

import eqquant
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from _llama_example import model as llama
from _one_layer import layer_by_kind
from jaxtyping import Array, Float, Int


# The matrices of a layer, in the order in which it uses them.
_STEPS = (("query", "key", "value"), ("output",), ("gate", "up"), ("down",))


class _Part(eqx.Module):
    """A layer, and its inputs for all batches."""

    layer: Any
    inputs: Float[Array, "batches rows length size"]
    kind: Int[Array, ""]


def corrected(
    model: Any,
    tokens: np.ndarray,
    format: eqquant.formats.Format | str,
    rows: int = 2,
    **options: Any,
) -> Any:
    """Return the model, unstacked, with its matrices in `format` and its embedding in
    INT8.

    `tokens` is `(count, length)`. A batch contains `rows` rows. Each step quantizes
    the matrices of one layer that share inputs, with options of `quantize_tree`.
    """
    model = llama.unstack(model)
    length, count = tokens.shape[1], len(tokens) // rows
    batches = tokens[: rows * count].reshape(count, rows, length)
    run_layer, kinds = layer_by_kind(model, length)
    forward = lambda part, i: run_layer(part.layer, part.inputs[i], part.kind)
    run = eqx.filter_jit(forward)
    after = lambda part: jnp.stack([run(part, i) for i in jnp.arange(count)])
    embedding = eqquant.quantize_tree(model.embedding, "int8")
    rounded = eqquant.dequantize_tree(embedding)
    expected = model.embed(batches)
    inputs = eqx.tree_at(lambda m: m.embedding, model, rounded).embed(batches)
    layers = []
    for layer, kind in zip(model.layers, map(jnp.array, kinds), strict=True):
        part, quantized = _Part(layer, expected, kind), _Part(layer, inputs, kind)
        for names in _STEPS:
            rules = {f"*.{name}.weight": format for name in names} | {"*": None}
            stats = eqquant.calibrate(
                forward,
                part,
                list(jnp.arange(count)),
                rules=rules,
                every_row=True,
                gradients_every=None,
                quantized=quantized,
                progress=False,
            )
            quantized = eqquant.quantize_tree(
                quantized, rules=rules, calibration=stats, progress=False, **options
            )
        layers.append(quantized.layer)
        expected, inputs = after(part), after(eqquant.dequantize_tree(quantized))
    return eqx.tree_at(
        lambda m: (m.embedding, m.layers), model, (embedding, tuple(layers))
    )
