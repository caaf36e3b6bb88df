"""Models and arrays with adapters, for several test files."""

import eqquant
import equinox as eqx
import jax
from eqquant.arrays import LoraArray
from helpers import assert_close


KEY = jax.random.key(0)
# Odd sizes, so that no activation has the size of a weight.
MLP = eqx.nn.MLP(67, 41, 53, 2, key=KEY)


def is_lora(x) -> bool:
    return isinstance(x, LoraArray)


def perturb(model):
    """Return adapters with nonzero `b`, as after training."""

    def one(x):
        if not is_lora(x):
            return x
        return x.replace(b=0.3 * jax.random.normal(jax.random.key(7), x.b.shape))

    return jax.tree.map(one, model, is_leaf=is_lora)


def adapted(model, format, rank=4, **options):
    if format is not None:
        model = eqquant.quantize_tree(model, format)
    return eqquant.lora_tree(model, rank, key=jax.random.key(1), **options)


def array(format, w, axis=-1, **options) -> LoraArray:
    """Return one weight with an adapter."""
    if format is not None:
        w = eqquant.quantize(w, format, axis=axis)
    options = {"rules": {"array": (4, axis)}, **options}
    return perturb(adapted({"array": w}, None, **options))["array"]


def check(fn, model, *args):
    """Check `fn` against the merged weights."""
    assert_close(fn(model, *args), fn(eqquant.merge_lora(model), *args))


def stacked(format, count=3, size=53, **options):
    keys = jax.random.split(KEY, count)
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(size, size, key=key))(keys)
    return perturb(adapted(layers, format, **options))
