"""The dispatcher: runs plain code on implicit arrays.

Exports `quaxify`, `register` for custom rules, and `substitute`, which replaces
implicit arrays inside of callables. `rules/` has a rule for each JAX primitive, and
`control/` handles primitives that contain jaxprs. Imports `arrays`, `partition`,
`primitives` and `_jax`.
"""

from . import control
from ._callables import substitute
from ._quaxify import quaxify
from .rules import register
