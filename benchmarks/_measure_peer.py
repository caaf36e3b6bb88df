"""One peer, measured in its own environment, where eqquant need not be installed.

    python benchmarks/_measure_peer.py NAME OPTIONS_AS_JSON

Prints JSON lines. Only NumPy and the peer itself are imported.
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
    """By how much a call raises the memory of this process above what it was, in MB;
    Linux only. What freed memory the allocators keep makes it a lower bound."""

    def status(name):
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines[name].split()[0]) / 1e3

    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Forget the peak.
        before = status("VmRSS")
    except OSError:
        return None, call()
    out = call()
    return status("VmHWM") - before, out


def judge(quantize: Quantize, weight, x, w: np.ndarray, products: Products):
    """A product of `x` with the quantized weight, and what is said of it but times."""
    quantize(weight)  # Compiles.
    start = time.perf_counter()
    product, size = quantize(weight)
    taken = time.perf_counter() - start
    put = products.put(x)
    product(put)
    memory, y = peak_of(lambda: products.get(product(put)))
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    return product, {
        "bytes_per_weight": size / w.size,
        "sqnr": -20 * float(np.log10(error)),
        "quantized_gb_per_s": w.nbytes / taken / 1e9,
        "peak_mb": memory,
    }


def ring(quantize: Quantize, weight, product, size: int, least: float) -> list:
    """Products with as many weights that they fill so many bytes."""
    others = range(math.ceil(least / size) - 1)
    return [product, *(quantize(weight)[0] for _ in others)]


def ratios_of(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """How many times as fast as the dense product: medians, slowest and fastest."""
    dense = statistics.median(times["dense"])
    return {
        name: [dense / t for t in (statistics.median(of), max(of), min(of))]
        for name, of in times.items()
    }


def measure(name: str, options: dict) -> None:
    products = _peers.find()[name].load()

    def one_pass(of, x):
        for product in of:
            products.get(product(x))

    for rows, columns in options["shapes"]:
        rng = np.random.default_rng(0)
        w = rng.standard_normal((rows, columns), dtype=np.float32)
        xs = {
            m: rng.standard_normal((m, columns), dtype=np.float32) for m in options["m"]
        }
        middle = xs[min(xs, key=lambda m: abs(m - 64))]
        weight = products.put(w)
        least = options["ring"] * 1e9
        calls = {"dense": ring(products.dense, weight, *products.dense(weight), least)}
        results: dict[str, dict] = {}
        for variant, quantize in products.quantized.items():
            report = {"variant": variant, "shape": [rows, columns]}
            try:
                product, said = judge(quantize, weight, middle, w, products)
            except Exception as error:
                short = f"{type(error).__name__}: {error}".splitlines()[0]
                print(json.dumps(report | {"failed": short}), flush=True)
                continue
            size = round(said["bytes_per_weight"] * w.size)
            calls[variant] = ring(quantize, weight, product, size, least)
            results[variant] = {**report, **said, "version": products.version}
        ratios, microseconds = {}, {}
        for m, x in xs.items():
            put = products.put(x)
            passes = interleaved(
                {k: lambda of=of, x=put: one_pass(of, x) for k, of in calls.items()},
                seconds=options["seconds"] * len(calls),
            )
            times = {
                name: [seconds / len(calls[name]) for seconds in each]
                for name, each in passes.items()
            }
            ratios[m] = ratios_of(times)
            microseconds[m] = {
                k: 1e6 * statistics.median(of) for k, of in times.items()
            }
        for variant, result in results.items():
            result["ratios"] = {m: ratio[variant] for m, ratio in ratios.items()}
            result["microseconds"] = {m: of[variant] for m, of in microseconds.items()}
            print(json.dumps(result), flush=True)
        dense = {m: of["dense"] for m, of in microseconds.items()}
        shape = [rows, columns]
        print(json.dumps({"shape": shape, "dense": dense}), flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2]))
