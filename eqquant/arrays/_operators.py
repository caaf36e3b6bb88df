"""Operators: products (`q @ x`, `x @ q`), indexing and scaling.

All other operators of arrays raise an error.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..primitives import straight_rounded
from ._implicit import ImplicitArray
from ._indexing import index_array
from ._materialise import materialise
from ._matmul import matmul


class UnsupportedError(TypeError, AttributeError):
    """An operator, method or attribute of `jax.Array` that implicit arrays lack.

    It is also an `AttributeError`, so that `hasattr` works.

    !!! Example

        ```python
        import eqquant
        import jax

        weight = jax.random.normal(jax.random.key(0), (64, 256))
        q = eqquant.quantize(weight, "nf4")
        try:
            q + 1
        except eqquant.arrays.UnsupportedError as error:
            print(error)
        ```
    """


def _unsupported(q: ImplicitArray, what: str) -> UnsupportedError:
    advice = (
        "Wrap the function that uses it in `eqquant.quaxify`, or decode the array with "
        "`.dequantize()`."
        if q.is_whole
        else "It lacks some of its parts. If `eqx.partition` removed them, call "
        "`eqx.combine` first."
    )
    return UnsupportedError(f"{what} is not supported by {q!r}. {advice}")


def _refuse(symbol: str) -> Any:
    def operator(self, *args, **kwargs):
        raise _unsupported(self, f"`{symbol}`")

    return operator


_of_jax_arrays = frozenset(dir(jax.Array))


class ArrayOperators(ImplicitArray):
    """An implicit array with the operators of arrays.

    It has no `__jax_array__`, because `x @ q` would then silently decode `q`.
    """

    # NumPy arrays defer `x @ q` to this class.
    __array_ufunc__ = None

    def __array__(self, *args, **kwargs):
        # Otherwise NumPy would convert the array row by row, like any sequence.
        raise TypeError(
            f"{self!r} does not turn into an array by itself: use `.dequantize()`."
        )

    def __getattr__(self, name: str):
        if name in _of_jax_arrays and not name.startswith("_"):
            raise _unsupported(self, f"`.{name}`")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.")

    #
    # Products
    #

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

    #
    # Scaling by a factor that is constant along the blocked axes
    #

    def __mul__(self, other):
        return self._scaled(other, lax.mul, "*")

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._scaled(other, lax.div, "/")

    def __neg__(self):
        return self * -1

    def __pos__(self):
        self.check_whole()
        return self

    def _scaled(self, other, fn: Callable, symbol: str):
        self.check_whole()
        if not eqx.is_array_like(other):
            if isinstance(other, ImplicitArray):
                raise _unsupported(self, f"`{symbol}` with another quantized array")
            return NotImplemented
        dtype = jnp.result_type(self.dtype, other)
        if jnp.issubdtype(dtype, jnp.floating):
            out = self.with_dtype(dtype).scaled(jnp.asarray(other, dtype), fn)
            if out is not NotImplemented:
                return out
        raise _unsupported(self, f"`{symbol}` with {_described(other)}")

    def __pow__(self, exponent, modulo=None):
        """Return an odd power if all levels are -1, 0 or 1. The power 1 is always
        allowed."""
        self.check_whole()
        is_integer = isinstance(exponent, int | np.integer)
        if is_integer and not isinstance(exponent, bool) and modulo is None:
            out = self.power(int(exponent))
            if out is not NotImplemented:
                return out
        raise _unsupported(self, f"`**` with {_described(exponent)}")

    #
    # Indexing
    #

    def __getitem__(self, index):
        """Index the array. Rows of a matrix are decoded, and only these rows. Results
        with two or more axes stay quantized."""
        self.check_whole()
        return index_array(self, index)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without axes.")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    #
    # Other operators raise. Otherwise some would be inherited from `object`, or from
    # `eqx.Module`, which compares whole pytrees.
    #

    __eq__ = _refuse("==")
    __ne__ = _refuse("!=")
    __lt__ = _refuse("<")
    __le__ = _refuse("<=")
    __gt__ = _refuse(">")
    __ge__ = _refuse(">=")

    def __hash__(self) -> int:
        return eqx.Module.__hash__(self)

    __bool__ = _refuse("bool()")
    __int__ = _refuse("int()")
    __float__ = _refuse("float()")
    __complex__ = _refuse("complex()")
    __contains__ = _refuse("in")
    __setitem__ = _refuse("[...] =")
    __add__ = __radd__ = _refuse("+")
    __sub__ = __rsub__ = _refuse("-")
    __rtruediv__ = _refuse("/")
    __floordiv__ = __rfloordiv__ = _refuse("//")
    __mod__ = __rmod__ = _refuse("%")
    __divmod__ = __rdivmod__ = _refuse("divmod()")
    __rpow__ = _refuse("**")
    __abs__ = _refuse("abs()")
    __round__ = _refuse("round()")
    __invert__ = _refuse("~")
    __and__ = __rand__ = _refuse("&")
    __or__ = __ror__ = _refuse("|")
    __xor__ = __rxor__ = _refuse("^")
    __lshift__ = __rlshift__ = _refuse("<<")
    __rshift__ = __rrshift__ = _refuse(">>")


def _described(x: Any) -> str:
    return f"an array of shape {jnp.shape(x)}" if jnp.ndim(x) else repr(x)
