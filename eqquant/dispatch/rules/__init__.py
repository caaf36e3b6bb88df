"""Rules for JAX primitives with implicit operands."""

from . import (
    _convolutions as _convolutions,
    _lookups as _lookups,
    _products as _products,
    _scaling as _scaling,
    _structural as _structural,
    _updates as _updates,
)
from ._registry import (
    control_rule_for as control_rule_for,
    control_rule_of as control_rule_of,
    Decoded as Decoded,
    register as register,
    rules_of as rules_of,
)
