"""Save in a process that is killed meanwhile. `test_killed.py` runs this program.

It forks before JAX starts threads, and saves NumPy arrays. Signals stop the children at
random times. With `--steps` they also stop before each system call that changes a file,
one call after the other. After each stop a complete checkpoint must be in place. Two
processes of a mesh that save together are stopped one at a time.
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
from eqquant.checkpoints.leaves._processes import Share, SingleProcess


# 64-bit arrays stay in NumPy, so loading starts no threads.
def tree(i: int) -> dict:
    return {f"w{j}": np.full(1000, i, np.int64) for j in range(4)}


SIZES = {"one file": None, "shards": 16_000, "other shards": 8_000}


class OneOfTwo(SingleProcess):
    """One of two processes that each hold half of each array."""

    def __init__(self, index: int, other: socket.socket, token: str):
        self.index, self._other, self._token = index, other, token

    def run_in_all(self, step):
        out = step()
        with contextlib.suppress(ConnectionError):
            self._other.send(b".")
            if self._other.recv(1):
                return out
        os._exit(1)  # The other process was stopped.

    def share_token(self, token):
        return self._token

    def shares(self, array):
        half = len(array) // 2
        yield Share(0, (half,), (0,), lambda: array[:half])
        yield Share(1, (half,), (half,), lambda: array[half:])


def save_and_stop(path, i: int, size, steps: int) -> None:
    """Save, and exit before the change number `steps`."""
    remaining = [steps]

    def count(event: str, args: tuple) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in ("os.rename", "os.remove", "os.mkdir"):
            step()

    def step():
        if not remaining[0]:
            os._exit(1)
        remaining[0] -= 1

    sys.addaudithook(count)
    fsync = os.fsync

    def counted(descriptor):
        step()
        fsync(descriptor)

    os.fsync = counted
    save(path, tree(i), max_shard_size=size)
    os._exit(0)


def in_place(path) -> int:
    """Return the number of the tree in the checkpoint, which must be complete."""
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
                assert i == 1 or not done, f"{before}, {after}: saved, but not in place"
                count += 1
                if done:
                    break
            # A later save removes all leftovers.
            save(path, tree(2))
            assert in_place(path) == 2
            assert os.listdir(path.parent) == [path.name]
    return count


def save_from_two(path, i: int, stopped: int = 0, steps: int = 10**9) -> list[int]:
    """Return the exit codes of two processes. The process `stopped` exits before the
    change number `steps`."""
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
                assert i == 1 or not done, f"{stopped}, {old}: saved, but not in place"
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
    longest = 2 * (time.perf_counter() - start)
    states = set()
    for _ in range(kills):
        child = os.fork()
        if not child:
            for i in range(300):  # Ends by itself if it is not killed.
                size = [None, 16_000, 8_000][i % 3]
                save(path, tree(i), max_shard_size=size)
            os._exit(0)
        time.sleep(rng.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        states.add(in_place(path))
    return len(states)


if __name__ == "__main__":
    folder, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    print(at_any_time(folder, kills))
    if "--steps" in sys.argv:
        print(at_every_step(folder), one_of_two(folder / "two"))
