"""Time one library on a GPU, in its own environment without eqquant.

    python benchmarks/_measure_gpu_peer.py NAME OPTIONS_AS_JSON

The script prints rows of the table of `gpu.py` as JSON. Launching a matmul from PyTorch
can take longer than the matmul itself, so the script records groups of matmuls as CUDA
graphs and replays them. Rows of libraries that do not support graphs end with "(no
graph)".
"""

import json
import sys

import _gpu_peers
from _interleaved import interleaved
from _rotation import rotation, sizes_for, summary


def recorded(call, torch):
    """Record a call as a CUDA graph. Return None if recording fails."""
    stream = torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay
    except Exception:
        torch.cuda.synchronize()
        return None


def alternating(groups, x, torch, on_gpu: bool, repeats: int):
    """Return two functions: one that multiplies with the next groups, and `prepare`.

    `prepare` records a graph for each group, and returns whether all groups have one.
    """
    calls, graphs = {}, True

    def eager(group):
        return lambda: [layer(x) for layer in group]

    def start():
        nonlocal graphs
        group = next(groups)
        if group not in calls:
            graph = recorded(eager(group), torch) if on_gpu else None
            graphs = graphs and graph is not None
            calls[group] = graph or eager(group)
        calls[group]()

    def call():
        for _ in range(repeats):
            start()
        if on_gpu:
            torch.cuda.synchronize()

    def prepare():
        while True:
            before = len(calls)
            start()
            if len(calls) == before:
                return graphs

    return call, prepare


def measure(name: str, options: dict) -> None:
    import torch

    torch.set_grad_enabled(False)
    on_gpu = options["platform"] == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise RuntimeError("PyTorch found no GPU")
    device = "cuda" if on_gpu else "cpu"
    (peer,) = (peer for peer in _gpu_peers.peers if peer.name == name)
    formats = {"": _gpu_peers.dense, **peer.load()}
    for k, n in options["sizes"]:
        w = torch.randn(n, k, device=device).bfloat16()
        for m in options["m"]:
            x = torch.randn(m, k, device=device).bfloat16()
            count, repeats = sizes_for(m * n * x.element_size(), options["group"])
            dense_median = None
            for format, make in formats.items():
                try:
                    _, size = make(w.clone())
                    make_layer = lambda make=make, w=w: make(w.clone())[0]
                    groups = rotation(make_layer, size, options["gigabytes"], count)
                    call, prepare = alternating(groups, x, torch, on_gpu, repeats)
                    graphs = prepare()
                    (times,) = interleaved(
                        {format: call}, seconds=options["seconds"]
                    ).values()
                except Exception as error:
                    short = f"{type(error).__name__}: {error}".splitlines()[0]
                    row = [f"{k}x{n}", m, format, f"{name} fails", short[:60]]
                    print(json.dumps([*row, "", "", ""]), flush=True)
                    continue
                median, best = summary(times, count * repeats)
                dense_median = dense_median or median
                variant = name if format else f"dense ({name})"
                row = [f"{k}x{n}", m, format, variant + " (no graph)" * (not graphs)]
                row += [f"{median:.1f} ({best:.1f})", f"{size / median / 1e3:.0f}"]
                row += [f"{dense_median / median:.2f}", ""]
                print(json.dumps(row), flush=True)
                del groups, call, prepare


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2]))
