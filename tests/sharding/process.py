"""One of several processes that share a mesh. `test_processes.py` runs it.

`python process.py INDEX COUNT PORT FOLDER` compares its shards of each result with a
local computation. The last process is killed at the end.
"""

import os
import pathlib
import signal
import sys

import eqquant
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from eqquant.checkpoints.leaves import _write
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


ROWS, SIZE = 16, 128
# Float32 sums in another order.
SUMS = 1e-5
RULES = {"layers.0.weight*": P("m", "d"), "layers.1.weight*": P("d", "m")}


def dense():
    return eqx.nn.MLP(SIZE, SIZE, 256, 1, key=jax.random.key(0))


def activation():
    return jax.random.normal(jax.random.key(1), (ROWS, SIZE))


def quantized(model):
    return eqquant.quantize_tree(
        model, eqquant.NF4(block_size=32), precision="highest", progress=False
    )


def adapted(model):
    model = eqquant.lora_tree(model, rank=2, key=jax.random.key(2))
    # Initially one factor is zero, so the gradient of the other would be zero.
    tune = eqquant.trainable_mask(model)
    trainable, frozen = eqx.partition(model, tune)
    return eqx.combine(jax.tree.map(lambda x: x + 0.1, trainable), frozen)


@eqx.filter_jit
def forward(model, x):
    return jax.vmap(model)(x)


@eqx.filter_jit
def step(model, x):
    """Compute one step of gradient descent for the adapters."""
    trainable, frozen = eqx.partition(model, eqquant.trainable_mask(model))
    loss = lambda t: jnp.mean(jax.vmap(eqx.combine(t, frozen))(x) ** 2)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, trainable, jax.grad(loss)(trainable))
    return eqx.combine(moved, frozen)


def reference():
    """Return the results of one process."""
    model, x = quantized(dense()), activation()
    trained = step(adapted(model), x)
    return {"model": model, "y": forward(model, x), "trained": trained}


def check(here, whole, bound=0.0):
    """Check the shards of this process against the whole."""
    arrays = [eqx.filter(tree, eqx.is_array) for tree in (here, whole)]
    for a, b in zip(*map(jax.tree.leaves, arrays), strict=True):
        assert not a.is_fully_addressable and a.dtype == b.dtype
        for i, shard in enumerate(a.addressable_shards):
            mine = np.asarray(shard.data)
            if b.is_fully_addressable:
                other = np.asarray(b)[shard.index]
            else:
                other = b.addressable_data(i)
            if bound:
                np.testing.assert_allclose(mine, other, bound, bound)
            else:
                np.testing.assert_array_equal(mine, other)


def main(index: int, count: int, port: str, folder: pathlib.Path) -> None:
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=auto)
    split = lambda tree, mesh=mesh: eqquant.shard_tree(
        tree, mesh, rules=RULES, batch="d"
    )

    skeleton = eqx.filter_eval_shape(reference)
    expected = eqquant.load(folder.with_name("reference.safetensors"), skeleton)

    # Sharded floats are quantized in place.
    model = split(quantized(split(dense())))
    check(model, expected["model"])

    x = jax.device_put(activation(), NamedSharding(mesh, P("d")))
    check(forward(model, x), expected["y"], SUMS)

    trained = step(split(adapted(expected["model"])), x)
    check(trained, expected["trained"], SUMS)

    keys = jax.random.split(jax.random.key(3), 4)
    keys = eqquant.shard_tree(keys, mesh, P("d"))
    tree = {"model": trained, "keys": keys}
    eqquant.save(folder, tree | {"step": 1})
    loaded = eqquant.load(folder, tree | {"step": 0})
    assert loaded["step"] == 1 and loaded["keys"].sharding == keys.sharding
    assert jnp.all(loaded["keys"] == keys)
    check(loaded["model"], trained)
    # Load into one process, and onto another mesh.
    other = jax.make_mesh((2, 4), ("d", "m"), axis_types=auto)
    like = {
        "model": skeleton["trained"],
        "keys": jax.ShapeDtypeStruct((4,), keys.dtype),
    }
    whole = eqquant.load(folder, like | {"step": 0})["model"]
    like = {"model": split(skeleton["trained"], other), "keys": keys, "step": 0}
    check(eqquant.load(folder, like)["model"], whole)

    write, last = _write._write, index == count - 1

    def full(*args):
        if last:
            raise OSError("no space left")
        return write(*args)

    _write._write = full
    try:
        eqquant.save(folder, tree | {"step": 2})
    except (OSError, RuntimeError) as error:
        assert isinstance(error, OSError) == last, error
    else:
        raise AssertionError("saved without one of the processes")

    def killed(*args):
        if last:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*args)

    _write._write = killed
    eqquant.save(folder, tree | {"step": 3})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]))
