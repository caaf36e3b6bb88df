"""Scaling by a factor that is constant along the blocked axes, and powers."""

import jax.numpy as jnp
from jax import lax

from ...arrays import ImplicitArray
from ._registry import rule_for


@rule_for(lax.mul_p)
def _mul(a, b):
    if isinstance(a, ImplicitArray) and isinstance(b, ImplicitArray):
        return NotImplemented
    q, factor = (a, b) if isinstance(a, ImplicitArray) else (b, a)
    return q.scaled(jnp.asarray(factor))


@rule_for(lax.div_p)
def _div(a, b):
    if isinstance(b, ImplicitArray):
        return NotImplemented
    return a.scaled(jnp.asarray(b), lax.div)


@rule_for(lax.neg_p)
def _neg(q):
    return q.scaled(jnp.asarray(-1, q.dtype))


@rule_for(lax.integer_pow_p)
def _integer_pow(q, *, y):
    return q.power(y)
