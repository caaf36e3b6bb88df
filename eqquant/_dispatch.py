"""The dispatcher: run plain code on quantized arrays."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, get_args

import equinox as eqx
import jax

from . import _compat
from ._callables import substitute
from ._control import control_rule
from ._implicit import ImplicitArray, is_implicit
from ._materialise import materialise, OnMaterialise
from ._typing import typed
from .rules import rules_of


@typed
def quaxify(fn: Callable, *, on_materialise: OnMaterialise = "warn") -> Callable:
    """Let a function that knows nothing of quantized arrays work on them.

    The function is traced with plain arrays of the same shapes in their place; what it
    does is then done again, primitive by primitive, with rules for quantized arrays.
    They are found in arguments, and in whatever the function holds: closures, bound
    methods, `functools.partial`, modules, globals. It composes with `jax.jit`,
    `jax.vmap`, `jax.grad`, `lax.scan`, `jax.checkpoint` and `jax.shard_map`, both
    outside and inside of the function.

    `eqx.nn` layers other than convolutions need none of this.

    !!! Example

        ```python
        import equinox as eqx
        import eqquant
        import jax

        conv = eqx.nn.Conv2d(16, 32, 3, key=jax.random.key(0))
        conv = eqquant.quantize_tree(conv, "int8")
        images = jax.random.normal(jax.random.key(1), (8, 16, 28, 28))
        out = jax.jit(eqquant.quaxify(jax.vmap(conv)))(images)
        assert out.shape == (8, 32, 26, 26)
        ```

    **Arguments:**

    - `fn`: a function, or any callable.
    - `on_materialise`: what to do where a quantized array would have to be decoded in
        full: `"allow"` it, `"warn"` (once for each primitive and place), or raise an
        `"error"`, which is how to prove that it does not happen.

    **Returns:**

    A function of the same arguments. Results may be quantized, where all that happened
    to a quantized array is that it was moved about.

    **Raises:**

    - `ValueError` if `on_materialise` is none of the three.
    - [`eqquant.MaterialiseError`][], when it is `"error"`.
    """
    if on_materialise not in get_args(OnMaterialise):
        raise ValueError(
            f"quaxify: on_materialise must be one of {get_args(OnMaterialise)}, got "
            f"{on_materialise!r}."
        )
    interpreter = Interpreter(on_materialise)

    def quaxified(*args, **kwargs):
        return interpreter.call(fn, *args, **kwargs)

    try:
        return ft.wraps(fn)(quaxified)
    except (AttributeError, TypeError):  # Not everything callable has a name.
        return quaxified


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """Evaluates jaxprs on arrays, quantized or not."""

    policy: OnMaterialise

    def call(self, fn: Callable, *args, **kwargs) -> Any:
        """Call `fn` on quantized arrays, wherever they are."""
        everything = (fn, args, kwargs)
        found: list[ImplicitArray] = []

        def collect(q):
            found.append(q)
            # Anything else, so that what holds it counts as changed.
            return jax.tree.leaves(q)[0]

        substitute(everything, collect)
        if not found:
            return fn(*args, **kwargs)

        leaves, treedef = jax.tree.flatten(everything, is_leaf=is_implicit)
        dynamic = [x for x in leaves if eqx.is_array(x)]
        out: dict[str, Any] = {}

        def flat(stand_ins, arrays):
            stand_in, array = iter(stand_ins), iter(arrays)
            filled = [next(array) if eqx.is_array(x) else x for x in leaves]
            fn, args, kwargs = substitute(
                jax.tree.unflatten(treedef, filled), lambda _: next(stand_in)
            )
            results, out["treedef"] = jax.tree.flatten(fn(*args, **kwargs))
            out["static"] = [None if _is_traced(x) else x for x in results]
            return [x for x in results if _is_traced(x)]

        jaxpr = jax.make_jaxpr(flat)([stand_in_for(q) for q in found], dynamic)
        results = iter(self.function(jaxpr)(*found, *dynamic))
        filled = [next(results) if x is None else x for x in out["static"]]
        return jax.tree.unflatten(out["treedef"], filled)

    def function(self, jaxpr) -> Callable[..., list]:
        """A jaxpr as a function."""
        return ft.partial(self.evaluate, jaxpr)

    def evaluate(self, jaxpr, *args) -> list:
        jaxpr, consts = _compat.open_jaxpr(jaxpr)
        env = dict(zip(jaxpr.constvars, consts, strict=False))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(var):
            return var.val if isinstance(var, _compat.Literal) else env[var]

        for eqn in jaxpr.eqns:
            values = [read(var) for var in eqn.invars]
            if any(isinstance(x, ImplicitArray) for x in values):
                results = self.apply(eqn, values)
            else:
                results = _compat.bind_equation(eqn, values)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def apply(self, eqn, args: list) -> list:
        """One equation with a quantized operand."""
        control = control_rule(eqn.primitive)
        if control is not None:
            return list(control(self, eqn, args))
        for rule in rules_of(eqn.primitive):
            result = rule(*args, **eqn.params)
            if result is not NotImplemented:
                multiple = eqn.primitive.multiple_results
                return list(result) if multiple else [result]
        what = self.describe(eqn)
        dense = [
            materialise(x, what, self.policy) if is_implicit(x) else x for x in args
        ]
        return _compat.bind_equation(eqn, dense)

    def describe(self, eqn) -> str:
        return f"`{eqn.primitive.name}` (at {_compat.source_of(eqn)})"


def stand_in_for(q: ImplicitArray) -> jax.ShapeDtypeStruct:
    """The array for which `q` stands, without its values."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.ShapeDtypeStruct(q.shape, q.dtype)
    # How it varies over the mesh, and how it is split, follow from the components.
    return jax.eval_shape(lambda q: q.dequantize(), q)


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.Array)
