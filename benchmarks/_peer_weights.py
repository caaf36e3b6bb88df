"""Quantize weights with another library, in its own environment.

`_round_weights.py` is the script that runs there.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import _quantizers
import numpy as np
from _environments import CACHE, install, last_line, run


HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT = 7200.0


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


def decoded_by(
    library: str,
    variant: str,
    folder: pathlib.Path,
    weights: Mapping[str, np.ndarray],
    batches: Iterable[tuple[np.ndarray, np.ndarray]] = (),
) -> tuple[dict[str, np.ndarray], int]:
    """Return the weights that a variant of a library quantized and dequantized, and the
    bytes of their codes and scales.

    `folder` stays the same for all calls with these weights. Its folder `checkpoint`
    is for libraries that read a checkpoint. Raises a `RuntimeError` with the reason if
    the library fails, or cannot be installed."""
    if not (folder / "weights.npz").exists():
        write(folder, weights, batches)
    files = folder, folder / "checkpoint", CACHE
    (result,) = quantized_by(library, *files, [variant], TIMEOUT)
    if "failed" in result:
        raise RuntimeError(f"{result['version']}: {result['failed']}")
    with np.load(result["file"]) as decoded:
        return dict(decoded), result["bytes"]
