"""Choose the roundings of a decoder by AutoRound, one layer after the other."""

import eqquant
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from _llama_example import model as llama
from _one_layer import layer_by_kind
from eqquant.training import tune_rounding


def tuned(student, teacher, tokens: np.ndarray, steps: int, rows: int = 2):
    """Return the student, unstacked, with new codes in each layer.

    `tokens` is `(count, length)`. A step takes `rows` rows. The inputs of a layer come
    from the student's layers before it, and the expected outputs from the teacher.
    """
    student, teacher = llama.unstack(student), llama.unstack(teacher)
    run_layer, kinds = layer_by_kind(teacher, tokens.shape[1])
    forward = lambda layer, inputs: run_layer(layer, *inputs)
    run = eqquant.quaxify(forward)
    rounded = eqquant.dequantize_tree(student.embedding)
    rounded = eqx.tree_at(lambda m: m.embedding, teacher, rounded)
    split = lambda model: jnp.split(model.embed(tokens), len(tokens) // rows)
    expected, hidden = split(teacher), split(rounded)
    layers = []
    both = zip(student.layers, teacher.layers, strict=True)
    for (quantized, layer), kind in zip(both, map(jnp.array, kinds), strict=True):
        inputs = [(x, kind) for x in hidden]
        expected = [forward(layer, (x, kind)) for x in expected]
        batches = list(zip(inputs, expected, strict=True))
        layers.append(tune_rounding(quantized, layer, forward, batches, steps=steps))
        hidden = [run(layers[-1], x) for x in inputs]
    return eqx.tree_at(lambda m: m.layers, student, tuple(layers))
