"""A program that saves, and is killed while it does. Run by `test_killed.py`.

It forks before JAX has started a thread, and saves arrays of NumPy. The children are
stopped by a signal, at any time; and with `--steps` also at each call of the operating
system that changes a file, one after the other. After each, what is in place must be
whole. Two that save together, as processes of one mesh do, are stopped one at a time.
"""

import contextlib
import os
import pathlib
import random
import signal
import socket
import sys
import time

import numpy as np
from eqquant import load, save
from eqquant.checkpoints import _save
from eqquant.checkpoints.leaves._processes import Alone, Share


# 64 bits stay NumPy's, so that loading starts no threads either.
def tree(i: int) -> dict:
    return {f"w{j}": np.full(1000, i, np.int64) for j in range(4)}


SIZES = {"one file": None, "shards": 16_000, "other shards": 8_000}


class OneOfTwo(Alone):
    """Half of each array is in one process, and half in the other."""

    def __init__(self, index: int, other: socket.socket, token: str):
        self.index, self._other, self._token = index, other, token

    def together(self, step):
        out = step()
        with contextlib.suppress(ConnectionError):
            self._other.send(b".")
            if self._other.recv(1):
                return out
        os._exit(1)  # The other was stopped.

    def agree(self, token):
        return self._token

    def shares(self, array):
        half = len(array) // 2
        yield Share(0, (half,), (0,), lambda: array[:half])
        yield Share(1, (half,), (half,), lambda: array[half:])


def save_and_stop(path, i: int, size, steps: int) -> None:
    """Save, and exit before the change that comes after so many."""
    left = [steps]

    def count(event: str, args: tuple) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in ("os.rename", "os.remove", "os.mkdir"):
            step()

    def step():
        if not left[0]:
            os._exit(1)
        left[0] -= 1

    sys.addaudithook(count)
    fsync = os.fsync

    def counted(descriptor):
        step()
        fsync(descriptor)

    os.fsync = counted
    save(path, tree(i), max_shard_size=size)
    os._exit(0)


def in_place(path) -> int:
    """Which tree it is: an error if it is none."""
    found = load(path)
    (i,) = {int(x) for x in np.concatenate([*found.values()])}
    assert found.keys() == tree(i).keys()
    return i


def at_every_step(folder: pathlib.Path) -> int:
    count = 0
    for before, old in SIZES.items():
        for after, new in SIZES.items():
            path = folder / f"{before}, {after}" / "model.safetensors"
            for steps in range(100):
                save(path, tree(0), max_shard_size=old)
                child = os.fork()
                if not child:
                    save_and_stop(path, 1, new, steps)
                _, status = os.waitpid(child, 0)
                done = os.waitstatus_to_exitcode(status) == 0
                i = in_place(path)
                assert i == 1 or not done, f"{before}, {after}: saved, but not there"
                count += 1
                if done:
                    break
            # A save after that leaves nothing behind.
            save(path, tree(2))
            assert in_place(path) == 2
            assert os.listdir(path.parent) == [path.name]
    return count


def save_from_two(path, i: int, stopped: int = 0, steps: int = 10**9) -> list[int]:
    """How both of them ended; one exits after so many changes."""
    ends, children = socket.socketpair(), []
    for index in (0, 1):
        children.append(os.fork())
        if not children[-1]:
            ends[1 - index].close()
            processes = OneOfTwo(index, ends[index], f"{i:016x}")
            _save.processes_of = lambda *_: processes  # noqa: B023
            save_and_stop(path, i, 16_000, steps if index == stopped else 10**9)
    for end in ends:
        end.close()
    waited = (os.waitpid(child, 0)[1] for child in children)
    return [os.waitstatus_to_exitcode(status) for status in waited]


def one_of_two(folder: pathlib.Path) -> int:
    count = 0
    for stopped in (0, 1):
        for old in (None, 16_000, "two"):
            path = folder / f"{stopped}, {old}" / "model.safetensors"
            for steps in range(100):
                if old == "two":
                    assert save_from_two(path, 0) == [0, 0]
                else:
                    save(path, tree(0), max_shard_size=old)
                done = save_from_two(path, 1, stopped, steps) == [0, 0]
                i = in_place(path)
                assert i == 1 or not done, f"{stopped}, {old}: saved, but not there"
                count += 1
                if done:
                    break
            save(path, tree(2))
            assert in_place(path) == 2
            assert os.listdir(path.parent) == [path.name]
    return count


def at_any_time(folder: pathlib.Path, kills: int) -> int:
    path, rng = folder / "signal" / "model.safetensors", random.Random(0)
    start = time.perf_counter()
    for i in range(3):
        save(path, tree(i), max_shard_size=8_000)
    most = 2 * (time.perf_counter() - start)
    seen = set()
    for _ in range(kills):
        child = os.fork()
        if not child:
            for i in range(300):  # It ends if nobody kills it.
                size = [None, 16_000, 8_000][i % 3]
                save(path, tree(i), max_shard_size=size)
            os._exit(0)
        time.sleep(rng.uniform(0, most))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen.add(in_place(path))
    return len(seen)


if __name__ == "__main__":
    folder, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    print(at_any_time(folder, kills))
    if "--steps" in sys.argv:
        print(at_every_step(folder), one_of_two(folder / "two"))
