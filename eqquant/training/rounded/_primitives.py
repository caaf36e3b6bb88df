"""Three primitives: the product of an activation and a weight, and its derivatives.

A `custom_vjp` has the same derivatives. But under `jax.vmap`, its backward rule would
compute an outer product for each token, with scales of its own. A primitive adds the
mapped tokens to the tokens of one product.
"""

import functools as ft
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.dtypes import float0
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Key

from ..._jax import define_impl, match_varying, spec_of, wide_dtype, zero_tangent
from ...primitives import map_all_first
from ._codes import seed_of
from ._products import backward, decoded, encode, flat, forward, named
from ._specs import Recipe
from ._split import mesh_of, spec_of_product, specs_like, split, type_of_product


low_precision_dot_p = Primitive("low_precision_dot")
# Linear in the first operand, the tangent of `x` or of `w`. The others are the kept
# codes of `w` or of `x`, and the key.
dgrad_p, wgrad_p = Primitive("low_precision_dgrad"), Primitive("low_precision_wgrad")


def low_precision_dot(
    x: Float[Array, "*stack_and_tokens size"],
    w: Float[Array, "*stack rows size"],
    key: Key[Array, "*stack"] | None,
    *,
    recipe: Recipe,
    out_dtype: Any,
) -> Float[Array, "*stack_and_tokens rows"]:
    """Compute `x @ w.T` in the numbers of a recipe, in both directions."""
    moved = match_varying(x, w)
    if moved[1] is not w:
        # Devices then sum the gradients of the weight in float32.
        moved = match_varying(x, w.astype(wide_dtype(w.dtype)))
    keys = () if key is None else match_varying(moved[0], key)[1:]
    return low_precision_dot_p.bind(
        *moved, *keys, recipe=recipe, out_dtype=jnp.dtype(out_dtype)
    )


#
# Values and types
#


def _spec(x, w):
    return spec_of_product(spec_of(x)[:-1], spec_of(w)[-2])


def _dot(x, w, *_, recipe: Recipe, out_dtype):
    def run(x, w):
        of_x, of_w, _, _ = encode(flat(x, w.ndim - 2), w, recipe, keep=False)
        out = forward(of_x, of_w, recipe, out_dtype)
        return out.reshape(*x.shape[:-1], w.shape[-2])

    return split(run, _spec(x, w), x, w)


def _dot_type(x, w, *_, recipe: Recipe, out_dtype):
    del recipe
    shape = *x.shape[:-1], w.shape[-2]
    return type_of_product(x, w, shape, out_dtype, _spec(x, w))


def _dgrad(x_dot, *args, recipe: Recipe, tree, out_dtype):
    """Return `x_dot @ w.T` for the kept codes of `w`."""
    kept, _ = tree.unflatten(args)

    def run(x_dot, kept):
        w = decoded(kept, recipe, "dgrad", kept.codes.shape[-2])
        out = _dense(flat(x_dot, w.ndim - 2).astype(jnp.float32), w)
        return out.reshape(*x_dot.shape[:-1], w.shape[-2]).astype(out_dtype)

    return split(run, _spec(x_dot, kept.codes), x_dot, kept)


def _dgrad_type(x_dot, *args, recipe: Recipe, tree, out_dtype):
    codes = tree.unflatten(args)[0].codes
    return _dot_type(x_dot, codes, recipe=recipe, out_dtype=out_dtype)


def _wgrad(w_dot, *args, recipe: Recipe, tree, tokens, out_dtype):
    """Return `x @ w_dot.T` for the kept codes of `x`."""
    kept, _ = tree.unflatten(args)
    stack = w_dot.ndim - 2

    def run(w_dot, kept):
        x = decoded(kept, recipe, "wgrad", math.prod(tokens))
        out = _dense(x, w_dot.astype(jnp.float32))
        shape = *w_dot.shape[:stack], *tokens, w_dot.shape[-2]
        return out.reshape(shape).astype(out_dtype)

    return split(run, _wgrad_spec(w_dot, kept.codes, tokens), w_dot, kept)


def _wgrad_spec(w_dot, codes, tokens):
    *stack, first, _ = spec_of(codes)
    lead = *stack, *(first, *[None] * len(tokens))[: len(tokens)]
    return spec_of_product(lead, spec_of(w_dot)[-2])


def _wgrad_type(w_dot, *args, recipe: Recipe, tree, tokens, out_dtype):
    del recipe
    codes = tree.unflatten(args)[0].codes
    shape = *w_dot.shape[:-2], *tokens, w_dot.shape[-2]
    spec = _wgrad_spec(w_dot, codes, tokens)
    return type_of_product(w_dot, codes, shape, out_dtype, spec)


def _dense(a, b):
    """Return `a @ b.T` in float32."""
    stack = tuple(range(b.ndim - 2))
    numbers = ((a.ndim - 1,), (b.ndim - 1,)), (stack, stack)
    return lax.dot_general(a, b, numbers, precision="highest")


for _primitive, _value, _type in (
    (low_precision_dot_p, _dot, _dot_type),
    (dgrad_p, _dgrad, _dgrad_type),
    (wgrad_p, _wgrad, _wgrad_type),
):
    define_impl(_primitive, _value)
    _primitive.def_abstract_eval(_type)
    mlir.register_lowering(_primitive, mlir.lower_fun(_value, multiple_results=False))


def jaxpr_of_product(eqn: Any) -> Any:
    """Return the jaxpr of a product, which has the operands of its equation."""
    value = ft.partial(_dot, **eqn.params)
    return jax.make_jaxpr(value)(*(var.aval for var in eqn.invars))


#
# Derivatives
#


@ft.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiable_once(fn: Callable, *args):
    return fn(*args)


@_differentiable_once.defjvp
def _(fn, primals, tangents):
    raise NotImplementedError(_second)


_second = (
    "low_precision: second derivatives of products in low precision are not defined, "
    "because rounding has none. Differentiate the model that "
    "`eqquant.training.master_weights` returns."
)


def _jvp(primals, tangents, *, recipe: Recipe, out_dtype):
    x, w, *keys = primals
    x_dot, w_dot, *_ = tangents
    if recipe.stochastic and not keys:
        raise ValueError(
            "low_precision: gradients are rounded stochastically, which needs a key "
            "for each step. Call `eqquant.training.with_rounding_key(model, key)` in "
            "the loss."
        )
    stack = w.ndim - 2
    tokens = x.shape[stack:-1]

    def encoded(x, w):
        return encode(flat(x, stack), w, recipe, keep=True)

    specs = None
    if mesh_of(x, w) is not None:
        of_x, of_w, kept_x, kept_w = jax.eval_shape(
            encoded, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w))
        )
        like_x, like_w = (ft.partial(specs_like, a, stack) for a in (x, w))
        specs = like_x(of_x), like_w(of_w), like_x(kept_x), like_w(kept_w)
    run = lambda x, w: split(encoded, specs, x, w)
    of_x, of_w, kept_x, kept_w = map(named, _differentiable_once(run, x, w))

    def multiplied(of_x, of_w):
        out = forward(of_x, of_w, recipe, out_dtype)
        return out.reshape(*x.shape[:-1], w.shape[-2])

    out = split(multiplied, _spec(x, w), of_x, of_w)
    static = {"recipe": recipe, "out_dtype": out_dtype}
    terms = []
    if not _is_zero(x_dot):
        kept, tree = jax.tree.flatten((of_w if kept_w is None else kept_w, keys))
        terms.append(_bind(dgrad_p, x_dot, *kept, tree=tree, **static))
    if not _is_zero(w_dot):
        kept, tree = jax.tree.flatten((of_x if kept_x is None else kept_x, keys))
        terms.append(_bind(wgrad_p, w_dot, *kept, tree=tree, tokens=tokens, **static))
    return out, ft.reduce(operator.add, terms) if terms else zero_tangent(out)


def _bind(primitive, *args, **static):
    return primitive.bind(*match_varying(*args), **static)


def _is_zero(tangent) -> bool:
    return type(tangent) is ad.Zero or tangent.dtype == float0


ad.primitive_jvps[low_precision_dot_p] = _jvp


def _linear_jvp(primitive, primals, tangents, **static):
    if not all(map(_is_zero, tangents[1:])):
        raise NotImplementedError(_second)
    out = primitive.bind(*primals, **static)
    if _is_zero(tangents[0]):
        return out, zero_tangent(out)
    return out, primitive.bind(tangents[0], *primals[1:], **static)


def _transpose(product, ct, tangent, *args, recipe: Recipe, tree, **_):
    nothing = [None] * len(args)
    if type(ct) is ad.Zero:
        return ad.Zero(tangent.aval), *nothing
    kept, keys = tree.unflatten(args)
    aval = tangent.aval

    def run(ct, kept, *keys):
        seed = None
        if recipe.stochastic:
            seed = seed_of(*keys, salt=product == "wgrad")
        g = flat(ct, kept.codes.ndim - 2)
        out = backward(g, kept, recipe, product, seed, aval.dtype)
        return out.reshape(aval.shape)

    whole = lambda *args: split(run, jax.sharding.PartitionSpec(*spec_of(aval)), *args)
    return _differentiable_once(whole, ct, kept, *keys), *nothing


for _primitive, _product in ((dgrad_p, "dgrad"), (wgrad_p, "wgrad")):
    ad.primitive_jvps[_primitive] = ft.partial(_linear_jvp, _primitive)
    ad.primitive_transposes[_primitive] = ft.partial(_transpose, _product)


#
# Batching
#


def _batch_dot(args, dims, **static):
    (x, w, *keys), (x_dim, w_dim, *key_dims) = args, dims
    if w_dim is not None:
        return low_precision_dot_p.bind(*map_all_first(args, dims), **static), 0
    # More tokens. Noise depends on the token, so one key serves all.
    keys = [
        k if d is None else lax.index_in_dim(k, 0, d, keepdims=False)
        for k, d in zip(keys, key_dims, strict=True)
    ]
    stack = w.ndim - 2
    if x_dim is None:
        return low_precision_dot_p.bind(x, w, *keys, **static), None
    x = jnp.moveaxis(x, x_dim, stack)
    return low_precision_dot_p.bind(x, w, *keys, **static), stack


def _batch_dgrad(args, dims, **static):
    (x_dot, *kept), (x_dim, *kept_dims) = args, dims
    if set(kept_dims) - {None}:
        return dgrad_p.bind(*map_all_first(args, dims), **static), 0
    stack = kept[0].ndim - 2
    return dgrad_p.bind(jnp.moveaxis(x_dot, x_dim, stack), *kept, **static), stack


def _batch_wgrad(args, dims, **static):
    return wgrad_p.bind(*map_all_first(args, dims), **static), 0


batching.primitive_batchers[low_precision_dot_p] = _batch_dot
batching.primitive_batchers[dgrad_p] = _batch_dgrad
batching.primitive_batchers[wgrad_p] = _batch_wgrad
