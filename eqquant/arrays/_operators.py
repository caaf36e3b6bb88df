"""The operators that a layer uses on its weight: `q @ x`, `x @ q`, `q[i]`."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..primitives import straight_rounded
from ._implicit import ImplicitArray
from ._indexing import index_array
from ._materialise import materialise
from ._matmul import matmul


class ArrayOperators(ImplicitArray):
    """An implicit array with the operators of an array.

    There is no `__jax_array__`: with it `x @ q` would decode without a word.
    """

    # NumPy arrays leave `x @ q` to us.
    __array_ufunc__ = None

    def __array__(self, *args, **kwargs):
        # Otherwise NumPy would put it together row by row, as any sequence.
        raise TypeError(
            f"{self!r} does not turn into an array by itself: use `.dequantize()`."
        )

    def __matmul__(self, other):
        return self._matmul(other, reflected=False)

    def __rmatmul__(self, other):
        return self._matmul(other, reflected=True)

    def _matmul(self, other, reflected):
        self.check_whole()
        if isinstance(other, ArrayOperators):
            small, large = sorted((self, other), key=lambda q: q.size)
            other = materialise(small, "a product of two quantized arrays", "warn")
            return large._matmul(other, reflected=reflected == (large is self))
        if not eqx.is_array(other) and not isinstance(other, np.ndarray):
            return NotImplemented
        other = jnp.asarray(other)
        out = matmul(self, other, reflected=reflected)
        if out is NotImplemented:
            dense = materialise(self, "matmul", "warn")
            if self.rounds_activations and jnp.issubdtype(other.dtype, jnp.floating):
                axis = other.ndim - 1 if reflected else max(other.ndim - 2, 0)
                other = straight_rounded(other, (axis,))
            return other @ dense if reflected else dense @ other
        return out

    def __getitem__(self, index):
        """As indexing of an array. Rows of a matrix come back in floating point: only
        they are decoded. Everything with two axes or more stays as it is stored."""
        self.check_whole()
        return index_array(self, index)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without axes.")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))
