"""Choose the roundings of a decoder by AutoRound, one layer after the other."""

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _llama_example import model as llama
from eqquant.training import tune_rounding


def tuned(student, teacher, tokens: np.ndarray, steps: int, rows: int = 2):
    """Return the student, unstacked, with new codes in each layer.

    `tokens` is `(count, length)`. A step takes `rows` rows. The inputs of a layer come
    from the student's layers before it, and the expected outputs from the teacher.
    """
    student, teacher = llama.unstack(student), llama.unstack(teacher)
    length = tokens.shape[1]
    views = teacher._views(length, length, 0, None)

    def forward(layer, x):
        return layer(x, view, None, None, 0, None)[0]

    # One view, so that all layers share a compiled program.
    if any(teacher.config.local):
        raise ValueError("Layers with local attention are not supported.")
    view = jax.tree.map(lambda x: x[0], views)
    run = eqquant.quaxify(forward)
    expected = jnp.split(teacher.embedding.weight[tokens], len(tokens) // rows)
    embedding = eqquant.dequantize_tree(student.embedding).weight
    inputs = jnp.split(embedding[tokens], len(tokens) // rows)
    layers = []
    for quantized, layer in zip(student.layers, teacher.layers, strict=True):
        expected = [forward(layer, x) for x in expected]
        batches = list(zip(inputs, expected, strict=True))
        layers.append(tune_rounding(quantized, layer, forward, batches, steps=steps))
        inputs = [run(layers[-1], x) for x in inputs]
    return eqx.tree_at(lambda m: m.layers, student, tuple(layers))
