"""The public names of eqquant."""

import inspect
import types
from typing import Any

import eqquant


MODULES = (
    eqquant.arrays,
    eqquant.calibration,
    eqquant.checkpoints,
    eqquant.debug,
    eqquant.formats,
    eqquant.kernels,
    eqquant.primitives,
    eqquant.sharding,
    eqquant.training,
    eqquant.trees,
)


def names_at_the_top() -> list[str]:
    """Return the public names in `eqquant` itself, without modules."""
    public = [name for name in vars(eqquant) if not name.startswith("_")]
    return [name for name in public if not inspect.ismodule(getattr(eqquant, name))]


def public_names() -> dict[str, Any]:
    """Return each public object by its documented path.

    The path is `eqquant.name` for everyday names, and `eqquant.module.name` for all
    others.
    """
    top = names_at_the_top()
    found = {f"eqquant.{name}": getattr(eqquant, name) for name in top}
    for module in MODULES:
        for name in documented(module):
            value = getattr(module, name)
            if name in top and getattr(eqquant, name) is value:
                continue
            found[f"{module.__name__}.{name}"] = value
    return found


def documented(module: types.ModuleType) -> list[str]:
    return module.__all__
