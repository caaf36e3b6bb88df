"""What a JAX primitive does when an operand is a quantized array."""

from . import _products as _products, _structural as _structural
from ._registry import register as register, rules_of as rules_of
