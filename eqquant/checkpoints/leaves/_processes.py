"""The processes that write one checkpoint, or read it, at the same time."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from ..files import Piece, to_numpy


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of an array: which process has it, where it is (None for all of the
    array), and how to get it there."""

    owner: int
    shape: tuple[int, ...]
    start: tuple[int, ...] | None
    make: Callable[[], np.ndarray]

    def piece(self, of: str, shape: tuple[int, ...]) -> Piece | None:
        return None if self.start is None else Piece(of, shape, self.start)


class Alone:
    """One process, whatever others do. The first of all has the index 0."""

    index = 0

    def together(self, step: Callable[[], T]) -> T:
        """Take a step in every process, and wait for all: an error in one is an error
        everywhere."""
        return step()

    def agree(self, token: str) -> str:
        """What the first process says, in all of them."""
        return token

    def shares(self, array: Any) -> Iterator[Share]:
        """Who has what of an array, the same in every process."""
        yield Share(0, tuple(array.shape), None, lambda: to_numpy(array))


class Everyone(Alone):
    """All processes of a program on many hosts."""

    def __init__(self, caller: str):
        self.index = jax.process_index()
        self._caller = caller

    def together(self, step):
        out: Any = None
        error = None
        try:
            out = step()
        except Exception as caught:
            error = caught
        failed = multihost_utils.process_allgather(np.array(error is not None))
        if error is not None:
            raise error
        if np.any(failed):
            raise RuntimeError(
                f"{self._caller}: process {np.flatnonzero(failed)[0]} failed, and says "
                "why. What was in place before is there still."
            )
        return out

    def agree(self, token):
        raw = np.frombuffer(token.encode(), np.uint8)
        return bytes(np.asarray(multihost_utils.broadcast_one_to_all(raw))).decode()

    def spans(self, array: Any) -> bool:
        return spans_processes(array)

    def owner(self, device: Any) -> int:
        return device.process_index

    def shares(self, array):
        if not self.spans(array) or not array.size:
            zeros = lambda: np.zeros(array.shape, array.dtype)
            make = zeros if not array.size else lambda: to_numpy(array)
            yield Share(0, tuple(array.shape), None, make)
            return
        for shard in array.global_shards:
            if shard.replica_id:
                continue
            start = tuple(index.start or 0 for index in shard.index)
            shape = array.sharding.shard_shape(array.shape)
            make = lambda shard=shard: to_numpy(shard.data)
            is_whole = shape == array.shape
            owner = self.owner(shard.device)
            yield Share(owner, shape, None if is_whole else start, make)


def spans_processes(x: Any) -> bool:
    """Whether an array, or what describes one, is on devices of several processes."""
    sharding = getattr(x, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def processes_of(tree: Any, caller: str) -> Alone:
    """Those that have parts of a tree, or are to have them."""
    is_wide = any(map(spans_processes, jax.tree.leaves(tree)))
    return Everyone(caller) if is_wide else Alone()


def local_parts(array: Any) -> Iterator[np.ndarray]:
    """What this process has of an array."""
    if not spans_processes(array):
        yield to_numpy(array)
        return
    seen = set()
    for shard in array.addressable_shards:
        where = tuple((s.start, s.stop) for s in shard.index)
        if where not in seen:
            seen.add(where)
            yield to_numpy(shard.data)


def read_onto(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    dtype: Any,
    read: Callable[[list[tuple[slice, ...]]], list[np.ndarray]],
) -> jax.Array:
    """An array that is split over devices, of the slices that this process needs."""
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(f"{np.dtype(dtype).name} needs jax_enable_x64, which is off.")

    def filled(index):
        return tuple(
            slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True)
        )

    key = lambda index: tuple((s.start, s.stop) for s in filled(index))
    indices = sharding.addressable_devices_indices_map(shape).values()
    needed = {key(index): filled(index) for index in indices}
    found = dict(zip(needed, read([*needed.values()]), strict=True))
    return jax.make_array_from_callback(
        shape, sharding, lambda index: found[key(index)], dtype=dtype
    )
