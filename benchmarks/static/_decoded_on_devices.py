"""Find weights that a program for several devices dequantizes."""

import dataclasses
import math
from typing import Any

import jax
from eqquant.debug._flow import Flow
from eqquant.debug._in_hlo import decoded_in_hlo
from eqquant.debug._inspect import has_codes, weight_of
from eqquant.formats import num_codes


def decoded_on_devices(text: str, args: Any) -> list[str]:
    """Return the places where a device holds a weight in floating point: its own shard,
    or the shard together with parts that it gathered.

    **Arguments:**

    - `text`: the text of a program that was compiled with `keep_unused=True`.
    - `args`: the program's arguments: arrays or abstract arrays, with shardings.
    """
    flows = {}

    def follow(q):
        if has_codes(q):
            weight = weight_of(q)
            shard = q.codes.sharding.shard_shape(q.codes.shape)
            own = num_codes(math.prod(shard), q.format.bits)
            # XLA gathers either axis of a matrix, or one after the other.
            matrix = own // math.prod(shard[:-2])
            sizes = {own, matrix}
            for axis in (-1, -2):
                sizes.add(matrix * q.codes.shape[axis] // shard[axis])
            weight = dataclasses.replace(weight, matrices=weight.matrices | sizes)
            flows[id(q.codes)] = Flow({weight: own})

    jax.tree.map(follow, args, is_leaf=has_codes)
    leaves = jax.tree.leaves(args)
    return decoded_in_hlo(
        text, [flows.get(id(leaf), Flow(data=True)) for leaf in leaves]
    )
