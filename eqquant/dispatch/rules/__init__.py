"""Rules for JAX primitives with implicit operands."""

from . import _convolutions, _lookups, _products, _scaling, _structural, _updates
from ._registry import control_rule_for, control_rule_of, Decoded, register, rules_of
