"""The only function that decodes a whole weight, and its policy."""

from typing import Literal, TypeAlias

from .._jax import warn


OnMaterialise: TypeAlias = Literal["allow", "warn", "error"]


class MaterialiseWarning(UserWarning):
    """A whole quantized array was decoded, which takes the memory of the float weight.

    The argument `on_materialise` of [`eqquant.quaxify`][] controls this warning.
    """


class MaterialiseError(RuntimeError):
    """An operation needs a whole decoded array, which `on_materialise="error"`
    forbids."""


def materialise(q, what: str, policy: OnMaterialise):
    """Decode the whole of `q` for the operation `what`, if the policy allows it."""
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
