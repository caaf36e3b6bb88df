"""The dispatcher: runs plain code on implicit arrays.

Exports `quaxify`, `register` for rules of your own, and `substitute`, which replaces
implicit arrays inside of callables. `rules/` says what each JAX primitive does to an
implicit array; `control/` handles primitives that hold jaxprs. Imports `arrays`,
`primitives` and `_jax`.
"""

from . import control as control
from ._callables import substitute as substitute
from ._quaxify import quaxify as quaxify
from .rules import register as register
