"""The only function that decodes a whole weight, and its policy."""

from typing import Literal, TypeAlias

from .._jax import warn


OnMaterialise: TypeAlias = Literal["allow", "warn", "error"]


class MaterialiseWarning(UserWarning):
    """A whole quantized array was decoded, which takes the memory of the float weight.

    The argument `on_materialise` of [`eqquant.quaxify`][] controls this warning.

    !!! Example

        ```python
        import eqquant
        import jax
        import warnings

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf4")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", eqquant.arrays.MaterialiseWarning)
            eqquant.quaxify(jax.numpy.sort)(q)
        ```
    """


class MaterialiseError(RuntimeError):
    """An operation needs a whole decoded array, which `on_materialise="error"`
    forbids.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf4")
        sort = eqquant.quaxify(jax.numpy.sort, on_materialise="error")
        try:
            sort(q)
        except eqquant.MaterialiseError as error:
            print(error)
        ```
    """


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
