"""The one way to a whole weight in floating point, and the policy that guards it."""

from typing import Literal, TypeAlias

from .._jax import warn


OnMaterialise: TypeAlias = Literal["allow", "warn", "error"]


class MaterialiseWarning(UserWarning):
    """A quantized array was decoded in full, which takes the memory of the float
    weight. `on_materialise` of [`eqquant.quaxify`][] decides about it."""


class MaterialiseError(RuntimeError):
    """A quantized array would have been decoded in full, and `on_materialise="error"`
    forbids it."""


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
        warn(message, MaterialiseWarning, once=True)
    return q.dequantize()
