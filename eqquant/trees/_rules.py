"""Rules by path."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from .._jax import warn
from ..formats import as_format, Format
from ..kernels import Compute
from ._conventions import Axis
from ._roles import is_never_a_weight, role
from ._sites import Site


@dataclasses.dataclass(frozen=True)
class QuantizationRule:
    """A rule of [`eqquant.quantize_tree`][] for the arrays that match a pattern.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        model = eqx.nn.MLP(64, 10, 256, 2, key=jax.random.key(0))
        per_tensor = eqquant.trees.QuantizationRule("int8", axis=(0, 1))
        rules = {"layers.0.weight": per_tensor}
        quantized = eqquant.quantize_tree(model, "nf4", rules=rules)
        scales = quantized.layers[0].weight.scales
        assert (scales == scales[0]).all()
        ```

    **Arguments:**

    - `format`: a format, or the name of one; `None` to leave them unchanged.
    - `axis`: as in [`eqquant.quantize`][]; `None` for the contracted axis of the layer.
    - `compute`: an [`eqquant.kernels.Compute`][] for these arrays; `None` for the
        `compute` of the whole model.
    """

    format: Format | str | None
    axis: Axis | None = None
    compute: Compute | None = None


class Rules:
    """Ordered rules by path. The first match wins.

    `parse` converts the value of a rule to a format (None: leave unchanged), an axis
    (None: the contracted axis of the layer), and an [`eqquant.kernels.Compute`][]
    (None: the settings of the whole model).
    """

    def __init__(
        self,
        rules: Mapping | None,
        parse: Callable[[Any], tuple],
        caller: str,
    ):
        self._caller = caller
        self._rules = []
        for pattern, rule in (rules or {}).items():
            if not isinstance(pattern, str | re.Pattern):
                raise TypeError(
                    f"{caller}: rules must have strings (with * and ?) or compiled "
                    f"regular expressions as patterns, got {pattern!r}."
                )
            try:
                self._rules.append((pattern, parse(rule)))
            except (TypeError, ValueError) as error:
                message = f"{caller}: rule {pattern!r}: {error}"
                raise type(error)(message) from None
        self._used: set = set()
        self._example = ""
        # The first array that each pattern with wildcards has skipped.
        self._skipped: dict[Any, Site] = {}

    def find(self, site: Site) -> tuple | None:
        self._example = self._example or site.path
        for pattern, rule in self._rules:
            if matches(pattern, site.path):
                excluded = pattern != site.path and is_never_a_weight(site)
                if excluded and rule[0] is not None:
                    self._skipped.setdefault(pattern, site)
                    continue
                self._used.add(pattern)
                return rule
        return None

    def warn_of_unused(self) -> None:
        """Warn about rules that changed nothing."""
        unused = [pattern for pattern, _ in self._rules if pattern not in self._used]
        for pattern in unused:
            if site := self._skipped.get(pattern):
                found = role(site)
                why = found if isinstance(found, str) else "of one axis"
                warn(
                    f"{self._caller}: the rule {pattern!r} only matches arrays that "
                    f"rules with wildcards skip, such as {site.path} ({why}). Use the "
                    f"exact path {site.path!r} to choose it.",
                    UserWarning,
                )
        if nothing := [pattern for pattern in unused if pattern not in self._skipped]:
            example = f" Paths look like {self._example!r}." if self._example else ""
            message = f"{self._caller}: these rules match nothing: {nothing}.{example}"
            warn(message, UserWarning)


def matches(pattern: str | re.Pattern, path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(path) is not None
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


def format_rule(rule: Any) -> tuple[Format | None, Axis | None, Compute | None]:
    if isinstance(rule, QuantizationRule):
        rule = rule.format, rule.axis, rule.compute
    elif not isinstance(rule, tuple):
        rule = (rule,)
    if not 1 <= len(rule) <= 3:
        raise ValueError(
            f"it must be a format, or (format, axis), or (format, axis, compute), got "
            f"{len(rule)} values."
        )
    format, axis, compute = (*rule, None, None)[:3]
    return None if format is None else as_format(format), axis, compute
