"""What a leaf is to its layer: a weight, and along which axes, or why it is none."""

import dataclasses
from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp

from ..arrays import is_implicit, is_quantized
from ._sites import Site


Axis = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight, and the axis (or axes) that its layer contracts; the one that it puts
    out, or None for all others; and whether it is looked up rather than multiplied."""

    axis: Axis
    out: int | None = None
    is_table: bool = False


# Names of dictionary entries: what Flax and Haiku call their weights.
_kernels, _tables = ("kernel", "w"), ("embedding", "embeddings")


def classify(site: Site) -> Weight | str:
    """A weight, or the reason why it is none."""
    if is_quantized(site.leaf):
        return "already quantized"
    return role(site)


def role(site: Site) -> Weight | str:
    """The same, whether it is quantized already or not."""
    leaf, owner, field = site.leaf, site.owner, site.field
    if not is_implicit(leaf) and not eqx.is_inexact_array(leaf):
        return "not a floating-point array"
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"of dtype {leaf.dtype}"
    if site.reparameterised:
        return "normalised anew at each call"
    if isinstance(owner, eqx.nn.Linear | eqx.nn.Embedding) and field == "weight":
        is_table = isinstance(owner, eqx.nn.Embedding)
        return Weight(-1, -2, is_table) if leaf.ndim > 1 else "of one axis"
    if isinstance(owner, eqx.nn.Conv | eqx.nn.ConvTranspose) and field == "weight":
        window = owner.num_spatial_dims
        return Weight(tuple(range(-window - 1, 0)), -window - 2)
    recurrent = isinstance(owner, eqx.nn.GRUCell | eqx.nn.LSTMCell)
    if recurrent and field in ("weight_ih", "weight_hh"):
        return Weight(-1, -2)
    if isinstance(owner, Mapping):
        if field in _tables and leaf.ndim == 2:
            return Weight(-1, is_table=True)
        if field in _kernels and leaf.ndim == 2:
            return Weight(0)
        if field in _kernels and leaf.ndim > 3:
            return Weight(tuple(range(leaf.ndim - 1)))
        if field in _kernels and leaf.ndim == 3:
            return "a kernel whose contracted axes only a rule can tell"
    return "not the weight of a known layer"


def is_never_a_weight(site: Site) -> bool:
    """Part of a layer whose weights are known, and not one of them: a bias, a norm."""
    if site.reparameterised:
        return True
    known = type(site.owner).__module__.startswith("equinox.nn")
    return known and isinstance(role(site), str)
