"""Processes that write or read one checkpoint together."""

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
    """A part of an array: its owner, its shape, its position (`None` if it is the whole
    array), and the function that copies it to the host."""

    owner: int
    shape: tuple[int, ...]
    start: tuple[int, ...] | None
    make: Callable[[], np.ndarray]

    def piece(self, of: str, shape: tuple[int, ...]) -> Piece | None:
        """Return the share as a piece of the tensor `of`, or `None` if it is whole."""
        return None if self.start is None else Piece(of, shape, self.start)


class SingleProcess:
    """A single process. Its index is 0."""

    index = 0

    def run_in_all(self, step: Callable[[], T]) -> T:
        """Run a step in every process and wait for all. An error in one process raises
        in all."""
        return step()

    def share_token(self, token: str) -> str:
        """Return the token of the first process, in every process."""
        return token

    def shares(self, array: Any) -> Iterator[Share]:
        """Yield the shares of an array, in the same order in every process."""
        yield Share(0, tuple(array.shape), None, lambda: to_numpy(array))


class AllProcesses(SingleProcess):
    """All processes of a program on several hosts."""

    def __init__(self, caller: str):
        self.index = jax.process_index()
        self._caller = caller

    def run_in_all(self, step):
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
                f"{self._caller}: process {np.flatnonzero(failed)[0]} failed; see its "
                "error. The previous checkpoint is unchanged."
            )
        return out

    def share_token(self, token):
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
    """Return whether an array, or a description of one, is spread over devices of
    several processes."""
    sharding = getattr(x, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def processes_of(tree: Any, caller: str) -> SingleProcess:
    """Return the processes that hold parts of a tree, or will hold them."""
    is_wide = any(map(spans_processes, jax.tree.leaves(tree)))
    return AllProcesses(caller) if is_wide else SingleProcess()


def local_parts(array: Any) -> Iterator[np.ndarray]:
    """Yield the distinct shards of an array in this process."""
    if not spans_processes(array):
        yield to_numpy(array)
        return
    yielded = set()
    for shard in array.addressable_shards:
        position = tuple((s.start, s.stop) for s in shard.index)
        if position not in yielded:
            yielded.add(position)
            yield to_numpy(shard.data)


def read_onto(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    dtype: Any,
    read: Callable[[list[tuple[slice, ...]]], list[np.ndarray]],
) -> jax.Array:
    """Build an array that is split over devices. `read` gets only the slices that this
    process needs."""
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
