"""Libraries to compare with: each has a file here that makes a `peer`.

That file is imported where the library is not installed, too, so it imports the library
in functions only.
"""

import dataclasses
import importlib
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

# Makes of a float32 weight of (rows, columns) what is called with an activation of
# (m, columns), and its size in bytes.
Quantize = Callable[[Any], tuple[Callable, int]]


@dataclasses.dataclass(frozen=True)
class Products:
    """What a library has, once it is imported."""

    version: str
    # In float32, and by the name of what the weight becomes.
    dense: Quantize
    quantized: dict[str, Quantize]
    # NumPy to the library's arrays; and to NumPy, when all is done.
    put: Callable = lambda x: x
    get: Callable = np.asarray


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library: its name in the table, and how it is imported."""

    name: str
    load: Callable[[], Products]
    # What to install into its environment; nothing if it is installed beside eqquant.
    packages: tuple[str, ...] = ()
    # What to put before every C++ file of theirs that is compiled.
    header: str = ""
    # Variables that its process gets.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def find() -> dict[str, Peer]:
    """The peers by their names, those that need not be installed first."""
    files = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    peers = [importlib.import_module(f"{__name__}.{f.stem}").peer for f in files]
    peers.sort(key=lambda peer: bool(peer.packages))
    return {peer.name: peer for peer in peers}
