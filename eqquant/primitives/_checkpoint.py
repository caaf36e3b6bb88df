"""Policies of `jax.checkpoint` treat products of eqquant like dense products.

Their name, for policies on names, is the name of the primitive.
"""

from .._jax import register_product
from ._quantized_dot import quantized_dot_p
from ._rows_dot import rows_dot_p


def _contracted(eqn) -> tuple:
    """Return the axes of a quantized product, as for `lax.dot_general_p`."""
    x = eqn.invars[0].aval
    batch = tuple(range(x.ndim - 2))  # The codes may be a stack.
    last = x.ndim - 1
    over = (last,), (last - eqn.params["matmul"].contract_rows,)
    return over, (batch, batch)


register_product(quantized_dot_p, _contracted)
register_product(rows_dot_p, lambda eqn: (((1,), (1,)), ((), ())))
