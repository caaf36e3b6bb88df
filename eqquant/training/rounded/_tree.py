"""Low-precision training of whole models."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from ..._jax import typed
from ...arrays import is_implicit, LoraArray, MatrixAxes
from ...trees import (
    Choice,
    choose_among,
    map_weights,
    replace_chosen,
    Rules,
    Site,
    Tree,
    WeightAxes,
)
from .._keys import renew_keys, split_key
from ._array import LowPrecisionArray
from ._specs import NUMBERS, PRESETS, Recipe


_name = "low_precision"


@typed
def low_precision(
    model: Tree,
    recipe: Recipe | str = "int8",
    *,
    where: Any = None,
    rules: Mapping | None = None,
    min_size: int = 256,
) -> Tree:
    """Train in low precision: round the operands of products, in both directions.

    Each chosen weight becomes an array that keeps the float weight, which the optimiser
    updates. A product with it rounds both operands, and so do the two products of its
    backward pass: `g @ w` for the activation ("dgrad"), and `g.T @ x` for the weight
    ("wgrad"). The gradient is the straight-through one. Sums have at least float32
    precision. Model code, losses and optimisers do not change.

    | preset | forward | dgrad and wgrad | |
    |---|---|---|---|
    | `"int8"` | int8 | int8 | one scale per row: qwix's w8a8g8 |
    | `"fp8"` | E4M3 | gradients in E5M2 | one scale per row |
    | `"mxfp8"` | E4M3 | E4M3 | blocks of 32 (arXiv 2506.08027) |
    | `"nvfp4"` | E2M1 | E2M1 | blocks of 16 (arXiv 2509.25149); numerics only |

    All tokens of a batch are the rows of one product, also under `jax.vmap`. The
    backward pass keeps the codes of activations from the forward pass, not floats.
    With int8 and 8-bit floats, scales along the contracted axis of a backward product
    are applied to the gradient before it is rounded, so nothing is rounded twice.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        model = eqquant.training.low_precision(model, "int8")


        @eqx.filter_jit
        @eqx.filter_grad
        def gradient(model, x):
            return jnp.sum(jax.vmap(model)(x) ** 2)


        gradients = gradient(model, jnp.ones((32, 64)))
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients))
        model = eqquant.training.master_weights(model)
        assert type(model.layers[0].weight) is type(jnp.ones(()))
        ```

    **Arguments:**

    - `model`: any pytree.
    - `recipe`: a preset, or a [`eqquant.training.Recipe`][] with a spec for each
        product.
    - `where`, `min_size`: as in [`eqquant.quantize_tree`][]. Embeddings are not chosen
        by default. A weight with an adapter counts as one weight: both factors of the
        adapter are wrapped, and the weight below it unless it is quantized.
    - `rules`: as in [`eqquant.quantize_tree`][], with recipes instead of formats.

    **Returns:**

    A pytree of the same type. [`eqquant.training.master_weights`][] inverts it.

    **Raises:**

    `ValueError` for an unknown recipe, or if no weight is chosen. `TypeError`, with the
    path, if an array is not floating point.
    """
    whole = _as_recipe(recipe)

    def is_candidate(leaf):
        if isinstance(leaf, LoraArray):
            return True
        is_array = eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
        return is_array or isinstance(leaf, LowPrecisionArray)

    def is_worth_it(site: Site, kind: WeightAxes, _) -> bool:
        return site.leaf.size >= min_size and not kind.is_table

    choices = choose_among(
        is_candidate,
        model,
        whole,
        is_worth_it=is_worth_it,
        where=where,
        rules=Rules(rules, _parse_rule, _name),
        caller=_name,
    )
    if not choices:
        raise ValueError(
            f"{_name}: no weight is chosen, so this would train in floating point. See "
            "where, rules and min_size."
        )
    return replace_chosen(_wrap_leaf, model, choices, caller=_name)


def _as_recipe(recipe: Any) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str) and recipe in PRESETS:
        return PRESETS[recipe]
    raise ValueError(
        f"{_name}: recipe must be one of {tuple(PRESETS)}, or an "
        f"eqquant.training.Recipe of the specs {tuple(NUMBERS)}; got {recipe!r}."
    )


def _parse_rule(rule: Any) -> tuple[Recipe | None, Any, None]:
    recipe, axis = rule if isinstance(rule, tuple) else (rule, None)
    return None if recipe is None else _as_recipe(recipe), axis, None


def _wrap_leaf(leaf: Any, choice: Choice) -> Any:
    recipe, axes = choice.what, MatrixAxes.of(leaf.ndim, choice.axis, choice.out)
    if not isinstance(leaf, LoraArray):
        return _wrap(leaf, recipe, axes.inputs, axes.outputs)
    base, ins, outs = leaf.base, len(leaf.in_axes), len(leaf.out_axes)
    # A quantized weight is frozen, and has products of its own.
    if not is_implicit(base) or isinstance(base, LowPrecisionArray):
        base = _wrap(base, recipe, axes.inputs, axes.outputs)
    a = _wrap(leaf.a, recipe, tuple(range(-ins, 0)), (-ins - 1,))
    b = _wrap(leaf.b, recipe, (-1,), tuple(range(-outs - 1, -1)))
    return leaf.replace(base=base, a=a, b=b)


def _wrap(
    weight: Any, recipe: Recipe, in_axes: tuple[int, ...], out_axes: tuple[int, ...]
) -> LowPrecisionArray:
    if isinstance(weight, LowPrecisionArray):
        raise ValueError(
            "it is in low precision already. Call `eqquant.training.master_weights` "
            "first."
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"the weight must be floating point, not {weight.dtype}.")
    return LowPrecisionArray(jnp.asarray(weight), None, recipe, in_axes, out_axes)


@typed
def master_weights(model: Tree) -> Tree:
    """Return a model with plain float weights: the inverse of
    [`eqquant.training.low_precision`][].

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        wrapped = eqquant.training.low_precision(model, "fp8")
        assert (eqquant.training.master_weights(wrapped).weight == model.weight).all()
        ```

    **Arguments:**

    - `model`: any pytree. Other arrays do not change.
    """

    unwrap = lambda x: x.master if isinstance(x, LowPrecisionArray) else x
    plain = lambda leaf: map_weights(unwrap, leaf)
    return jax.tree.map(plain, model, is_leaf=is_implicit)


@typed
def with_rounding_key(model: Tree, key: PRNGKeyArray | None) -> Tree:
    """Change the key for the stochastic rounding of gradients.

    Call it in the loss, with a new key for each step. Each weight, and each layer of a
    stack, gets a key of its own. The same key gives the same bits, also on several
    devices.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax
        import jax.numpy as jnp

        model = eqx.nn.Linear(64, 32, key=jax.random.key(0))
        recipe = eqquant.training.Recipe("int8", stochastic=True)
        model = eqquant.training.low_precision(model, recipe)


        @eqx.filter_grad
        def gradient(model, x, key):
            model = eqquant.training.with_rounding_key(model, key)
            return jnp.sum(jax.vmap(model)(x) ** 2)


        gradient(model, jnp.ones((8, 64)), jax.random.key(1))
        ```

    **Arguments:**

    - `model`: a pytree from [`eqquant.training.low_precision`][], with a recipe that
        has `stochastic=True`.
    - `key`: a random key, or `None`.

    **Returns:**

    The same pytree with new keys.

    **Raises:**

    `ValueError` if a key is given, and no weight is rounded stochastically.
    """

    def renew(x, key_of):
        if not isinstance(x, LowPrecisionArray) or not x.recipe.stochastic:
            return x
        lead = [x.shape[axis] for axis in x.lead_axes]
        return x.replace(key=split_key(key_of(), lead))

    return renew_keys(
        lambda leaf, key_of: map_weights(lambda x: renew(x, key_of), leaf),
        model,
        key,
        "with_rounding_key: no weight of model is rounded stochastically: pass a "
        "Recipe with stochastic=True to low_precision.",
    )
