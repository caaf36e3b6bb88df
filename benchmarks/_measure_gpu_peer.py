"""One library on a GPU, measured in its own environment, where eqquant need not be
installed.

    python benchmarks/_measure_gpu_peer.py NAME OPTIONS_AS_JSON

Prints rows of the table of `gpu.py` as JSON. Launching a product may take PyTorch
longer than the GPU takes for it, so a group of them is recorded and replayed as one
graph; the row says if the library does not allow that.
"""

import json
import sys

import _gpu_peers
from _interleaved import interleaved
from _rotation import rotation, sizes_for, summary


def recorded(call, torch):
    """A graph that does the same, or None if it cannot be recorded."""
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


def turns(groups, x, torch, on_gpu: bool, repeats: int):
    """A call that takes the next groups; and what makes a graph of each before, and
    says whether there are graphs of all."""
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
        raise RuntimeError("PyTorch sees no GPU")
    device = "cuda" if on_gpu else "cpu"
    (peer,) = (peer for peer in _gpu_peers.peers if peer.name == name)
    formats = {"": _gpu_peers.dense, **peer.load()}
    for k, n in options["sizes"]:
        w = torch.randn(n, k, device=device).bfloat16()
        for m in options["m"]:
            x = torch.randn(m, k, device=device).bfloat16()
            count, repeats = sizes_for(m * n * x.element_size(), options["group"])
            of_dense = None
            for format, make in formats.items():
                try:
                    _, size = make(w.clone())
                    one = lambda make=make, w=w: make(w.clone())[0]
                    groups = rotation(one, size, options["gigabytes"], count)
                    call, prepare = turns(groups, x, torch, on_gpu, repeats)
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
                of_dense = of_dense or median
                by = name if format else f"dense, beside {name}"
                row = [f"{k}x{n}", m, format, by + " (no graph)" * (not graphs)]
                row += [f"{median:.1f} ({best:.1f})", f"{size / median / 1e3:.0f}"]
                print(json.dumps([*row, f"{of_dense / median:.2f}", ""]), flush=True)
                del groups, call, prepare


if __name__ == "__main__":
    measure(sys.argv[1], json.loads(sys.argv[2]))
