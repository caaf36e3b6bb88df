"""The role of a leaf in its layer: a weight with its axes, or the reason why not."""

import equinox as eqx
import jax.numpy as jnp

from ..arrays import is_implicit, is_quantized
from ._conventions import axes_by_fields, convention_of, WeightAxes
from ._sites import Site


A_BIAS = "a bias"


def classify(site: Site) -> WeightAxes | str:
    """Return the weight, or the reason why the leaf cannot be quantized."""
    if is_quantized(site.leaf):
        return "already quantized"
    return role(site)


def role(site: Site) -> WeightAxes | str:
    """Like [`classify`][], but the leaf may already be quantized."""
    leaf = site.leaf
    if not is_implicit(leaf) and not eqx.is_inexact_array(leaf):
        return "not a floating-point array"
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"of dtype {leaf.dtype}"
    if site.reparameterised:
        return "computed anew at each call"
    convention = convention_of(site.owner)
    found = (convention or axes_by_fields)(site.owner, site.field, leaf)
    if found is not None:
        return found
    if "bias" in site.field or site.field == "b":
        return A_BIAS
    if leaf.ndim < 2:
        return "of one axis" if leaf.ndim else "a scalar"
    return "not the weight of a known layer"


def weight_of(site: Site) -> WeightAxes | str:
    """Like [`role`][], but an array that a rule has quantized is also a weight."""
    found = role(site)
    if isinstance(found, str) and is_quantized(site.leaf):
        return WeightAxes(site.leaf.axes)
    return found


def is_never_a_weight(site: Site) -> bool:
    """Return whether rules with wildcards skip a leaf.

    They skip vectors, arrays that are not floating point, biases, and arrays of known
    layers that are not weights.
    """
    leaf = site.leaf
    if site.reparameterised or leaf.ndim < 2:
        return True
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return True
    found = role(site)
    known = type(site.owner).__module__.startswith("equinox.nn")
    return isinstance(found, str) and (known or found == A_BIAS)
