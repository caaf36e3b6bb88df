"""Time one library on a CPU, in its own environment without eqquant.

    python benchmarks/_measure_peer.py NAME OPTIONS_AS_JSON

The script prints JSON lines. It imports only NumPy and the library.
"""

import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import _peers
import numpy as np
from _interleaved import interleaved
from _peers import Products, Quantize


def peak_of(call: Callable[[], Any]) -> tuple[float | None, Any]:
    """Return the growth of this process's peak memory in MB, and the call's result.

    The growth is None on systems other than Linux. It is a lower bound: the call
    can reuse memory that allocators keep.
    """

    def status(name):
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[name].split()[0]) / 1e3

    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Reset the peak.
        before = status("VmRSS")
    except OSError:
        return None, call()
    out = call()
    return status("VmHWM") - before, out


def evaluate(quantize: Quantize, weight, x, w: np.ndarray, products: Products):
    """Quantize a weight. Return its matmul, and all entries of its row except times."""
    quantize(weight)  # Compiles.
    start = time.perf_counter()
    product, size = quantize(weight)
    seconds = time.perf_counter() - start
    put = products.put(x)
    product(put)
    memory, y = peak_of(lambda: products.get(product(put)))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    return product, {
        "bytes_per_weight": size / w.size,
        "sqnr": -20 * float(np.log10(error)),
        "quantized_gb_per_s": w.nbytes / seconds / 1e9,
        "peak_mb": memory,
    }


# The largest number of matmuls of a program. Language models have a few hundred.
_PER_PROGRAM = 128


class Ring:
    """Matmuls with enough copies of a weight to fill `options["ring"]` gigabytes, as
    one call each, or joined into programs."""

    def __init__(self, quantize: Quantize, weight, first, size: int, options: dict):
        others = range(math.ceil(options["ring"] * 1e9 / size) - 1)
        matmuls = [first, *(quantize(weight)[0] for _ in others)]
        self.count = len(matmuls)
        self.calls = matmuls
        if join := options["join"]:
            starts = range(0, self.count, _PER_PROGRAM)
            self.calls = [join(matmuls[i : i + _PER_PROGRAM]) for i in starts]


def ratios_of(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the speed relative to dense: the median, the slowest and the fastest."""
    dense = statistics.median(times["dense"])
    return {
        name: [dense / t for t in (statistics.median(runs), max(runs), min(runs))]
        for name, runs in times.items()
    }


def measure(name: str, options: dict) -> None:
    products = _peers.find()[name].load()
    if options["program"] and products.join is None:
        raise ValueError(f"--program must be used with llama.cpp or JAX, got {name}")
    options["join"] = products.join if options["program"] else None

    def one_pass(calls, x):
        for call in calls:
            products.get(call(x))

    for rows, columns in options["shapes"]:
        rng = np.random.default_rng(0)
        w = rng.standard_normal((rows, columns), dtype=np.float32)
        xs = {
            m: rng.standard_normal((m, columns), dtype=np.float32) for m in options["m"]
        }
        middle = xs[min(xs, key=lambda m: abs(m - 64))]
        weight = products.put(w)
        dense = products.dense(weight)
        rings = {"dense": Ring(products.dense, weight, *dense, options)}
        results: dict[str, dict] = {}
        for variant, quantize in products.quantized.items():
            report = {"variant": variant, "shape": [rows, columns]}
            try:
                product, entries = evaluate(quantize, weight, middle, w, products)
            except Exception as error:
                short = f"{type(error).__name__}: {error}".splitlines()[0]
                print(json.dumps(report | {"failed": short}), flush=True)
                continue
            size = round(entries["bytes_per_weight"] * w.size)
            rings[variant] = Ring(quantize, weight, product, size, options)
            results[variant] = {**report, **entries, "version": products.version}
        ratios, microseconds = {}, {}
        for m, x in xs.items():
            put = products.put(x)
            passes = interleaved(
                {
                    name: lambda calls=ring.calls, x=put: one_pass(calls, x)
                    for name, ring in rings.items()
                },
                seconds=options["seconds"] * len(rings),
            )
            times = {
                name: [seconds / rings[name].count for seconds in runs]
                for name, runs in passes.items()
            }
            ratios[m] = ratios_of(times)
            microseconds[m] = {
                name: 1e6 * statistics.median(runs) for name, runs in times.items()
            }
        for variant, result in results.items():
            result["ratios"] = {m: ratio[variant] for m, ratio in ratios.items()}
            result["microseconds"] = {m: us[variant] for m, us in microseconds.items()}
            print(json.dumps(result), flush=True)
        dense = {m: us["dense"] for m, us in microseconds.items()}
        shape = [rows, columns]
        print(json.dumps({"shape": shape, "dense": dense}), flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2]))
