"""Cooperation of several processes, from the view of one process. `tests/sharding`
starts real processes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqquant.checkpoints.leaves import _processes
from eqquant.checkpoints.leaves._processes import AllProcesses, SingleProcess
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


@pytest.fixture
def others(monkeypatch):
    """Set the results of the other processes. This process is the first of three."""

    def set_failed(*failed):
        def gather(mine):
            return np.array([bool(mine), *failed])

        monkeypatch.setattr(multihost_utils, "process_allgather", gather)

    return set_failed


def split(x, *spec):
    mesh = jax.make_mesh((2, 4), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def fail():
    raise OSError("no space left")


def test_an_error_in_one_process_raises_in_all(others):
    processes = AllProcesses("save")
    others(False, False)
    assert processes.run_in_all(lambda: "done") == "done"
    others(False, True)
    with pytest.raises(RuntimeError, match="save: process 2"):
        processes.run_in_all(lambda: "done")
    # A process that failed raises its own error.
    with pytest.raises(OSError, match="no space left"):
        processes.run_in_all(fail)


def test_a_single_process():
    for processes in (SingleProcess(), AllProcesses("save")):
        assert processes.index == 0
        assert processes.run_in_all(lambda: 3) == 3
        assert processes.share_token("0123456789abcdef") == "0123456789abcdef"
        with pytest.raises(OSError, match="no space left"):
            processes.run_in_all(fail)


def test_the_first_process_writes_replicated_arrays(normal):
    """A single process also writes arrays that no other process shares."""
    w = split(normal(4, 8), "d", "m")
    assert type(_processes.processes_of({"w": w}, "save")) is SingleProcess
    empty = jnp.zeros((0, 4), jnp.bfloat16)
    for processes in (SingleProcess(), AllProcesses("save")):
        for array in (w, empty):
            (share,) = processes.shares(array)
            assert (share.owner, share.shape, share.start) == (0, array.shape, None)
            assert share.piece("w", array.shape) is None
            made = share.make()
            assert made.dtype == array.dtype
            np.testing.assert_array_equal(made, array)


class Wide:
    """An array on devices of several processes."""

    def __init__(self, array):
        self._array = array

    def __getattr__(self, name):
        return getattr(self._array, name)

    @property
    def sharding(self):
        return self

    is_fully_addressable = False


def test_arrays_over_several_processes_are_written_in_pieces(normal):
    x = normal(4, 8)

    class Shared(AllProcesses):
        def spans(self, array):
            return True

    processes = Shared("save")
    shares = list(processes.shares(split(x, None, "m")))
    assert len(shares) == 4  # Each shard once, although there are two copies.
    out = np.full((4, 8), np.nan, np.float32)
    for share in shares:
        piece = share.piece("w", (4, 8))
        assert share.owner == 0 and piece is not None
        where = zip(share.start, share.shape, strict=True)
        out[tuple(slice(at, at + n) for at, n in where)] = share.make()
    np.testing.assert_array_equal(out, x)
    # A replicated array is a single share.
    (whole,) = processes.shares(split(x))
    assert whole.start is None
    np.testing.assert_array_equal(whole.make(), x)


def test_local_parts_are_distinct(normal):
    x = normal(4, 8)
    wide = Wide(split(x, None, "m"))
    assert _processes.spans_processes(wide)
    assert type(_processes.processes_of([wide], "save")) is AllProcesses
    parts = list(_processes.local_parts(wide))
    np.testing.assert_array_equal(np.concatenate(parts, 1), x)
    (whole,) = _processes.local_parts(split(x, None, "m"))
    np.testing.assert_array_equal(whole, x)


def test_read_onto_reads_only_the_needed_slices(normal):
    x, requested = np.asarray(normal(4, 8)), []

    def read(places):
        requested.extend(places)
        return [x[place] for place in places]

    sharding = split(x, None, "m").sharding
    got = _processes.read_onto(sharding, x.shape, x.dtype, read)
    assert got.sharding == sharding
    np.testing.assert_array_equal(got, x)
    assert requested == [(slice(0, 4), slice(i, i + 2)) for i in range(0, 8, 2)]
    with pytest.raises(ValueError, match="float64.*jax_enable_x64"):
        _processes.read_onto(sharding, x.shape, np.float64, read)
