"""Quantize weights with another library, in its own environment.

`_round_weights.py` is the script that runs there.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import _quantizers
import numpy as np
from _environments import install, last_line, run


HERE = pathlib.Path(__file__).resolve().parent


def write(
    folder: pathlib.Path,
    weights: Mapping[str, np.ndarray],
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
) -> None:
    """Write the weights, and the tokens and masks to calibrate on."""
    np.savez(folder / "weights.npz", **weights)
    parts = {}
    for i, (tokens, mask) in enumerate(batches):
        parts |= {f"tokens{i}": tokens, f"mask{i}": mask}
    np.savez(folder / "batches.npz", **parts)


def quantized_by(
    name: str,
    folder: pathlib.Path,
    checkpoint: pathlib.Path,
    cache: pathlib.Path,
    variants: Sequence[str] = (),
    timeout: float = 1800,
) -> list[dict]:
    """Quantize the weights in a folder with the named variants of a library, or with
    all. Each result names a file with the dequantized weights, or the reason of a
    failure."""
    quantizer = _quantizers.find()[name]
    python = install(quantizer.environment, quantizer.packages, cache, quantizer.header)
    ran = run(
        python,
        str(HERE / "_round_weights.py"),
        *(name, str(folder), str(checkpoint), *variants),
        environment={},
        capture_output=True,
        timeout=timeout,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"variant"')]
    if ran.returncode and not lines:
        raise RuntimeError(f"fails: {last_line(ran.stderr)}")
    return [json.loads(line) for line in lines]
