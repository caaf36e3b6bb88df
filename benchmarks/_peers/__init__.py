"""Libraries to compare with on CPUs. Each file defines a `peer` for one library.

The files are also imported where the libraries are not installed. Therefore functions
import them.
"""

import dataclasses
import importlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

# Maps a float32 weight of shape (rows, columns) to a matmul, which takes activations of
# shape (m, columns), and to the size of the quantized weight in bytes.
Quantize = Callable[[Any], tuple[Callable, int]]


@dataclasses.dataclass(frozen=True)
class Products:
    """The matmuls of an imported library."""

    version: str
    # The float32 matmul, and the quantized matmuls by the names of their formats.
    dense: Quantize
    quantized: dict[str, Quantize]
    # `put` converts NumPy arrays to arrays of the library. `get` waits for a result and
    # converts it to NumPy.
    put: Callable = lambda x: x
    get: Callable = np.asarray
    # Joins matmuls into one program, which multiplies an activation with each weight in
    # turn, and returns the last result.
    join: Callable[[Sequence[Callable]], Callable] | None = None


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library: its name in the table, its packages, and how to import it."""

    name: str
    load: Callable[[], Products]
    # Packages to install into its environment. Without packages, the library runs in
    # the environment of eqquant.
    packages: tuple[str, ...] = ()
    # A header that pip includes at the start of every C++ file that it compiles.
    header: str = ""
    # Environment variables of its process.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def find() -> dict[str, Peer]:
    """Return the peers by name. Peers without packages come first."""
    files = sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py"))
    peers = [importlib.import_module(f"{__name__}.{f.stem}").peer for f in files]
    peers.sort(key=lambda peer: bool(peer.packages))
    return {peer.name: peer for peer in peers}
