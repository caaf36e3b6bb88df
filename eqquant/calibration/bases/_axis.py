"""The bases of axes."""

import dataclasses
import math

from ...arrays import hadamard_block


class Basis:
    """The basis of one or more axes, which are rotated together or not at all.

    It is a node of a union-find forest. A rotation multiplies each block of `block`
    consecutive values by the same matrix, so that slices between blocks, and reshapes
    that keep blocks whole, do not change it.
    """

    def __init__(self, size: int):
        self._parent: Basis | None = None
        self._block = hadamard_block(size)
        self._reason = ""

    @property
    def root(self) -> "Basis":
        node = self
        while node._parent is not None:
            node = node._parent
        return node

    @property
    def block(self) -> int:
        return self.root._block

    @property
    def reason(self) -> str:
        """Why the axes must keep their basis; empty if they may be rotated."""
        return self.root._reason

    def keep(self, reason: str) -> None:
        """Record that a rotation would change results."""
        root = self.root
        root._reason = root._reason or reason

    def limit(self, size: int) -> None:
        """Record that blocks must divide `size`."""
        root = self.root
        root._block = hadamard_block(math.gcd(root._block, size))

    def join(self, other: "Basis") -> None:
        a, b = self.root, other.root
        if a is not b:
            b._parent = a
            a.limit(b._block)
            a._reason = a._reason or b._reason


@dataclasses.dataclass(eq=False)
class Source:
    """An axis of a leaf of the model.

    **Fields:**

    - `path`, `ndim`: the path of the leaf, and the number of its axes.
    - `axis`: the index of the axis.
    - `uses`: how the leaf is used along this axis: a [`Gain`][] if it is that gain, or
        if a product contracts the axis with an activation that has the gain; None for
        any other use.
    - `is_contracted`: whether a product contracts this axis.
    """

    path: str
    ndim: int
    axis: int
    basis: Basis
    uses: "set[Gain | None]" = dataclasses.field(default_factory=set)
    is_contracted: bool = False


@dataclasses.dataclass(frozen=True)
class Gain:
    """A vector that multiplies an axis of an activation in the original basis, such as
    the weight of a norm.

    The result can be rotated only if the vector moves to the weights that read it.

    **Fields:**

    - `source`, `shift`: the vector is the leaf plus this number. The leaf may be a
        stack.
    """

    source: Source
    shift: float


@dataclasses.dataclass(frozen=True)
class Axis:
    """What is known about an axis of a value.

    **Fields:**

    - `basis`: None for an axis that keeps its basis.
    - `is_uniform`: whether all values along the axis are equal.
    - `source`, `shift`: the values are the axis of a leaf plus this number.
    - `origin`: the axis of a leaf, if the values are a part or a multiple of it.
    - `scans`: the loops that have chosen the source, or the gain, in a stack.
    - `gain`: the gain of the values.
    - `is_square`: whether the values are squares of values in the basis.
    - `is_zero`: whether all values of the array are zero.
    - `why`: why the axis keeps its basis.
    """

    basis: Basis | None = None
    is_uniform: bool = False
    source: Source | None = None
    origin: Source | None = None
    scans: tuple[int, ...] = ()
    shift: float = 0.0
    gain: Gain | None = None
    is_square: bool = False
    is_zero: bool = False
    why: str = ""

    @property
    def vector(self) -> Gain | None:
        """The values as a gain, if the leaf has no axes beside this one and those of
        the stack."""
        if self.source is None or self.source.ndim > 1 + len(self.scans):
            return None
        return Gain(self.source, self.shift)

    def shifted(self, number: float) -> "Axis":
        return dataclasses.replace(self, shift=self.shift + number)

    def moved(self, reason: str) -> "Axis":
        """Return the axis after an operation that keeps all values along it, or scales
        them equally."""
        if self.shift:
            return self.kept(reason)
        if self.source is not None:
            self.source.uses.add(None)
        return dataclasses.replace(self, source=None)

    def part(self, reason: str) -> "Axis":
        """Return the axis after an operation that keeps a part of the values."""
        return dataclasses.replace(self.used(reason), origin=self.origin)

    def used(self, reason: str) -> "Axis":
        """Return the axis after a linear operation, which may use a part of it."""
        if self.shift:
            return self.kept(reason)
        if self.source is not None:
            self.source.uses.add(None)
        if self.gain is not None:
            return self.kept(f"{self.gain.source.path}, which is no factor of a weight")
        if self.is_square:
            return self.kept(reason)
        return Axis(self.basis, self.is_uniform, why=self.why)

    def kept(self, reason: str) -> "Axis":
        """Return the axis after an operation that needs the original basis."""
        if self.source is not None:
            self.source.uses.add(None)
        if self.basis is not None:
            self.basis.keep(reason)
        return Axis(is_uniform=self.is_uniform, why=self.why or reason)


PLAIN = Axis()
UNIFORM = Axis(is_uniform=True)
ZERO = Axis(is_uniform=True, is_zero=True)


def added(a: Axis, b: Axis, reason: str) -> Axis:
    """Return the axis of a sum, or of a choice between two values."""
    if a.is_zero or b.is_zero:
        other = b if a.is_zero else a
        return Axis(other.used(reason).basis)
    a, b = a.used(reason), b.used(reason)
    if a.basis is not None and b.basis is not None:
        a.basis.join(b.basis)
        return a
    reason = a.why or b.why or reason
    a, b = a.kept(reason), b.kept(reason)
    return Axis(is_uniform=a.is_uniform and b.is_uniform, why=reason)


def multiplied(a: Axis, b: Axis, reason: str) -> Axis:
    """Return the axis of a product of elements."""
    if b.is_uniform:
        return a.moved(reason)
    if a.is_uniform:
        return multiplied(b, a, reason)
    for x, y in ((a, b), (b, a)):
        is_activation = x.basis is not None and x.source is None
        gain = y.vector
        if is_activation and x.gain is None and not x.is_square and gain is not None:
            gain.source.uses.add(gain)
            return Axis(x.basis, scans=y.scans, gain=gain)
    return _kept(a, b, reason)


def _kept(a: Axis, b: Axis, reason: str) -> Axis:
    reason = a.why or b.why or reason
    for axis in (a, b):
        axis.kept(reason)
    return Axis(why=reason)


def divided(a: Axis, b: Axis, reason: str) -> Axis:
    """Return the axis of a ratio of elements."""
    return multiplied(a, b, reason) if b.is_uniform else _kept(a, b, reason)


def squared(axis: Axis) -> Axis:
    return Axis(axis.basis, is_square=True)


def contract(a: Axis, b: Axis, reason: str) -> None:
    """Record that a product contracts two axes."""
    for axis in (a, b):
        if axis.origin is not None:
            axis.origin.is_contracted = True
    for x, weight in ((a, b), (b, a)):
        if x.gain is None or x.basis is None or weight.source is None:
            continue
        if x.scans == weight.scans and not weight.shift:
            x.basis.join(weight.source.basis)
            weight.source.uses.add(x.gain)
            return
    added(a, b, reason)
