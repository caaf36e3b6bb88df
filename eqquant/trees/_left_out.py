"""Warnings about arrays that stay in floating point."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .._jax import warn
from ..arrays import is_implicit
from ._choice import Choice
from ._report import why_not
from ._rules import format_rule, Rules
from ._sites import Site, sites
from ._size import likely_axes


# Warn if more than this share of the bytes stays in floating point.
_share = 0.2


def warn_of_left_out(
    model: Any,
    choices: Sequence[Choice],
    format: Any,
    *,
    where: Any,
    rules: Mapping | None,
    min_size: int,
    caller: str,
) -> None:
    """Warn if a large part of a model was not chosen for `format`.

    Arrays that `where` or a rule excludes, and small arrays, do not count.
    """
    found = [site for site in sites(model) if is_implicit(site.leaf) or _floats(site)]
    if format is None or any(is_implicit(site.leaf) for site in found):
        return
    if not choices:
        _warn_of_nothing(found, caller)
        return
    if where is not None:
        return
    chosen = {choice.path for choice in choices}
    known_rules = Rules(rules, format_rule, caller)
    left_out = [
        site
        for site in found
        if site.path not in chosen
        and site.leaf.size >= min_size
        and known_rules.find(site) is None
    ]
    share = sum(map(_nbytes, left_out)) / max(sum(map(_nbytes, found)), 1)
    if share > _share:
        largest = max(left_out, key=_nbytes)
        warn(
            f"{caller}: {share:.0%} of the bytes stay in floating point. The largest "
            f"array is {largest.path} of shape {tuple(largest.leaf.shape)}: "
            f"{why_not(largest)}. `eqquant.report` lists all arrays. Rules and "
            "`eqquant.trees.register_weights` choose more.",
            UserWarning,
        )


def _floats(site: Site) -> bool:
    dtype = getattr(site.leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _nbytes(site: Site) -> int:
    return site.leaf.size * site.leaf.dtype.itemsize


def _warn_of_nothing(found: Sequence[Site], caller: str) -> None:
    """Warn that no weight was chosen, with the reasons for the largest arrays."""
    largest = sorted(found, key=_nbytes, reverse=True)[:5]
    message = f"{caller}: nothing was chosen."
    for site in largest:
        shape = tuple(site.leaf.shape)
        message += f"\n  {site.path or 'the array'} {shape}: {why_not(site)}"
    if matrices := [site for site in largest if site.leaf.ndim > 1 and site.path]:
        message += f"\nA rule takes an array: {_rule_for(matrices[0])}"
    message += "\n`eqquant.trees.register_weights` makes the weights of a layer known."
    warn(message, UserWarning)


def _rule_for(site: Site) -> str:
    if site.leaf.ndim == 2:
        return f"`rules={{{site.path!r}: 'int8'}}`."
    return (
        f"`rules={{{site.path!r}: ('int8', {likely_axes(site.leaf.shape)})}}`, with "
        "the axes that its product contracts."
    )
