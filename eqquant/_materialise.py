"""The one way to a whole weight in floating point, and the policy that guards it."""

import sys
import warnings
from typing import Literal, TypeAlias


OnMaterialise: TypeAlias = Literal["allow", "warn", "error"]


class MaterialiseWarning(UserWarning):
    """A quantized array was decoded in full, which takes the memory of the float
    weight. See `on_materialise` of [`eqquant.quaxify`][]."""


class MaterialiseError(RuntimeError):
    """A quantized array would have been decoded in full, and `on_materialise="error"`
    forbids it."""


_internal = ("eqquant", "jax", "equinox", "jaxtyping", "beartype", "contextlib")


def _stacklevel() -> int:
    """Of the first frame that is the user's, so that Python shows the warning once for
    each place in their code."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in _internal:
            return level
        frame, level = frame.f_back, level + 1
    return 2


def materialise(q, what: str, policy: OnMaterialise):
    """Decode `q` in full, for `what`, if the policy lets us."""
    if policy != "allow":
        message = (
            f"{what} has no rule for {q!r} that keeps it quantized, and would "
            "decode it in full."
        )
        if policy == "error":
            raise MaterialiseError(
                f"{message} Dequantize it yourself, register a rule with "
                "`eqquant.register`, or pass `on_materialise='allow'`."
            )
        warnings.warn(message, MaterialiseWarning, stacklevel=_stacklevel())
    return q.dequantize()
