"""A search for decoded weights in a jaxpr and in the lowerings of products."""

import functools as ft
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import Literal, open_jaxpr, split_scan, subjaxprs
from ..formats import num_codes, planes_of
from ..primitives import implementation_on, quantized_dot_p, unflatten
from ._flow import (
    after,
    at_most,
    Flow,
    is_kernel,
    is_known,
    is_whole,
    join,
    Operand,
    settle,
    times,
    TrackedWeight,
)


def decoded_in_jaxpr(
    jaxpr: Any, flows: Sequence[Flow], flow_of: Callable[[Any], Flow], platform: str
) -> list[str]:
    """Return the primitive and shape of every array that is a whole weight.

    **Arguments:**

    - `jaxpr`: a closed jaxpr.
    - `flows`: the flows of its inputs.
    - `flow_of`: returns the flow of a constant.
    - `platform`: the platform whose lowerings of products are searched.
    """
    walk = _Walk(flow_of, platform)
    walk.run(jaxpr, flows, "")
    return list(walk.found)


class _Walk:
    def __init__(self, flow_of: Callable[[Any], Flow], platform: str):
        self.flow_of = flow_of
        self.platform = platform
        self.found: dict[str, None] = {}  # Results in order.
        self.product = ft.cache(ft.partial(_decoded_in_product, platform=platform))

    def run(self, jaxpr: Any, flows: Sequence[Flow], path: str) -> list[Flow]:
        """Return the flows of the results."""
        jaxpr, consts = open_jaxpr(jaxpr)
        known = dict(zip(jaxpr.invars, flows, strict=True))
        known |= dict(zip(jaxpr.constvars, map(self.flow_of, consts), strict=False))

        def read(var) -> Flow:
            return Flow() if isinstance(var, Literal) else known[var]

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [read(var) for var in eqn.invars], path)
            for var, flow in zip(eqn.outvars, outs, strict=True):
                known[var] = flow = at_most(flow, _size(var))
                if _is_float(var) and is_whole(flow, _size(var)):
                    name = f"{path}{eqn.primitive.name}"
                    self.found[f"{name} -> {var.aval.str_short()}"] = None
        return [read(var) for var in jaxpr.outvars]

    def equation(self, eqn, flows: list[Flow], path: str) -> list[Flow]:
        name = eqn.primitive.name
        path = f"{path}{name}/"
        if name in _loops:
            return _loops[name](self, eqn.params, flows, path)
        inner = [] if is_kernel(name) else list(subjaxprs(eqn.params))
        if not is_known(name) and len(inner) == 1 and _fits(inner[0], eqn):
            return self.run(inner[0], flows, path)  # Any kind of call.
        for jaxpr in inner:
            self.run(jaxpr, _by_type(jaxpr, eqn.invars, flows), path)
        if eqn.primitive is quantized_dot_p:
            operands = (_abstract(var) for var in eqn.invars)
            for found in self.product(*operands, **eqn.params):
                self.found[f"{path}{found}"] = None
        operands = [
            Operand(flow, _size(var), _can_be_activation(var))
            for flow, var in zip(flows, eqn.invars, strict=True)
        ]
        sizes = [_size(var) for var in eqn.outvars]
        window = math.prod(eqn.params.get("slice_sizes") or ())
        return [after(name, operands, size, window) for size in sizes]

    def scan(self, params, flows, path):
        jaxpr, length = params["jaxpr"], params["length"]
        consts, carry, xs = split_scan(params, flows)
        n = len(carry)
        step = lambda carry: self.run(jaxpr, [*consts, *carry, *xs], path)
        carry = settle(lambda carry: step(carry)[:n], carry)
        out = step(carry)
        return [*carry, *(times(flow, length) for flow in out[n:])]

    def loop(self, params, flows, path):
        n, m = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        consts, carry = flows[n:m], flows[m:]
        step = lambda carry: self.run(params["body_jaxpr"], [*consts, *carry], path)
        carry = settle(step, carry)
        self.run(params["cond_jaxpr"], [*flows[:n], *carry], path)
        return carry

    def branches(self, params, flows, path):
        outs = [self.run(branch, flows[1:], path) for branch in params["branches"]]
        return [join(column) for column in zip(*outs, strict=True)]


_loops = {"scan": _Walk.scan, "while": _Walk.loop, "cond": _Walk.branches}


def _size(var) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _is_float(var) -> bool:
    return jnp.issubdtype(getattr(var.aval, "dtype", jnp.int32), jnp.floating)


def _can_be_activation(var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return _is_float(var) or dtype in (jnp.int8, jnp.uint8)


def _abstract(var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)


def _fits(jaxpr, eqn) -> bool:
    jaxpr, _ = open_jaxpr(jaxpr)
    ins = len(jaxpr.invars) == len(eqn.invars)
    return ins and len(jaxpr.outvars) == len(eqn.outvars)


def _by_type(jaxpr, outer: Sequence, flows: Sequence[Flow]) -> list[Flow]:
    """Return flows for the inputs of an inner jaxpr of an unknown primitive.

    Each input may be any operand of the same type, or depend on all operands.
    """
    jaxpr, _ = open_jaxpr(jaxpr)
    type_of = lambda var: (
        getattr(var.aval, "shape", None),
        getattr(var.aval, "dtype", 0),
    )
    out = []
    for var in jaxpr.invars:
        pairs = zip(outer, flows, strict=True)
        same = [flow for other, flow in pairs if type_of(other) == type_of(var)]
        out.append(at_most(join(same or flows), _size(var)))
    return out


def _decoded_in_product(
    x, codes, *parts, platform: str, matmul, plan, stored
) -> list[str]:
    """Search the lowering of a product on a platform, as if it were inlined."""
    del plan
    bits = matmul.format.bits
    size, matrix = (num_codes(math.prod(codes.shape[i:]), bits) for i in (0, -2))
    weight = TrackedWeight(size, size, planes_of(bits), frozenset({size, matrix}))
    dot = ft.partial(implementation_on(platform), matmul=matmul)

    def run(x, codes, *parts):
        numbers, view = unflatten(codes, parts, stored)
        return dot(x, codes, *numbers, view)

    jaxpr = jax.make_jaxpr(run)(x, codes, *parts)
    flows = [Flow(data=True), Flow({weight: size}), *[Flow() for _ in parts]]
    return decoded_in_jaxpr(jaxpr, flows, lambda const: Flow(), platform)
