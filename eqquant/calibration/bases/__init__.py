"""The axes of weights and activations that share a basis, found in a traced function.

If all axes of a basis are rotated, the results of the function do not change.
"""

from ._axis import Basis, Source
from ._trace import sources_of


__all__ = ["Basis", "Source", "sources_of"]
