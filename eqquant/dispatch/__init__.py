"""The dispatcher: plain code, run on arrays in parts.

From here come `quaxify`, `register` for rules of your own, and `substitute`, which
finds arrays in callables. What a JAX primitive does to an array is in `rules/`, what
becomes of primitives that hold jaxprs in `control/`. This room imports `arrays`,
`primitives` and `_jax`.
"""

from . import control as control
from ._callables import substitute as substitute
from ._quaxify import quaxify as quaxify
from .rules import register as register
