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
    """Of the first frame that is the user's, for whom called this."""
    frame, level = sys._getframe(1), 1
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.split(".")[0] not in _internal:
            return level
        frame, level = frame.f_back, level + 1
    return 2


# Python's own filter would do, but forgets what it has shown whenever anything enters
# `warnings.catch_warnings`, as JAX does all the time.
_shown: set[tuple] = set()


def _warn_once(message: str):
    level = _stacklevel()
    frame = sys._getframe(level - 1)
    place = (message, frame.f_code.co_filename, frame.f_lineno)
    if place not in _shown:
        warnings.warn(message, MaterialiseWarning, stacklevel=level)
        _shown.add(place)


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
        _warn_once(message)
    return q.dequantize()
