"""Summarize the tables of `docs/benchmarks/tables` for README.md and the home page.

    python benchmarks/summary.py
    python benchmarks/summary.py --plot docs/images/accuracy.png
    python benchmarks/summary.py --output docs/benchmarks/tables/summary.md

The home page includes the file. A test requires that README.md contains the same text.
The plot shows accuracy against bytes for all rows of `accuracy.md`.
"""

import argparse
import pathlib

from _tables import add_output_options, output, print_table


TABLES = pathlib.Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "tables"
# For each library and number of bits, the most accurate format of `accuracy.md`.
PEERS = (
    "llama.cpp q8_0",
    "llama.cpp q5_K",
    "torchao int4 with HQQ, block size 32",
    "llm-compressor int4 by GPTQ, zero points, block size 32",
    "llama.cpp q4_K",
    "bitsandbytes NF4",
    "bitsandbytes NF4, double quantization",
    "torchao int3 with HQQ, block size 64",
    "llama.cpp q3_K",
    "llama.cpp q2_K",
)
OURS = "**eqquant**"


def read_table(name: str) -> list[dict[str, str]]:
    """Read a Markdown table as one dictionary per row."""
    lines = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (TABLES / f"{name}.md").read_text().splitlines()
        if line.startswith("|")
    ]
    head, _, *rows = lines
    return [dict(zip(head, row, strict=True)) for row in rows]


def at_equal_bytes() -> list[list[str]]:
    """Compare the formats in `PEERS` with eqquant at the same number of bytes.

    In `accuracy.md`, each row of eqquant follows the rows with the same budget.
    """
    table = [["library, format", "bits per weight", "top 10 kept", "eqquant"]]
    rows = read_table("accuracy")
    for i, row in enumerate(rows):
        name = row["library, format"]
        if name in PEERS:
            ours = next(r for r in rows[i:] if r["library, format"] == OURS)
            kept = row["same top 10"], f"**{ours['same top 10']}**"
            table.append([name, row["bits per weight"], *kept])
    return table


def speed() -> list[str]:
    """Return one line for CPUs and one for TPUs."""
    cpu = {row["library: format"]: row for row in read_table("peers-zen4-4096")}
    ms = lambda name: f"{int(cpu[name]['M=8']) / 1000:.1f} ms"
    us = lambda name: f"{cpu[name]['M=1']} µs"
    tpu = {
        (row["M"], row["format"], row["variant"]): row
        for row in read_table("tpu-14336")
    }
    times = lambda name, chip: tpu["8", name, "high"][chip].split(", ")[1]
    return [
        "- **CPU**: 8 rows by a weight of 4096 x 4096, on two cores of an AMD EPYC "
        f"(Zen 4). NF4 takes {ms('eqquant: nf4')}, llama.cpp's q4_0 "
        f"{ms('llama.cpp: q4_0')}, bitsandbytes' NF4 "
        f"{ms('bitsandbytes: nf4, float32')}, and dense float32 "
        f"{ms('eqquant: dense float32')}. With one row, NF4 takes "
        f"{us('eqquant: nf4')} and q4_0 {us('llama.cpp: q4_0')}. "
        "(`python benchmarks/peers.py`)",
        "- **TPU**: 8 rows by a weight of 4096 x 14336, estimated from the compiler's "
        f"schedule. NF4 is {times('nf4', 'v5e')} times as fast as dense bfloat16 on "
        f"v5e and {times('nf4', 'v6e')} times on v6e. INT8 is {times('int8', 'v5e')} "
        f"and {times('int8', 'v6e')} times as fast. "
        "(`python benchmarks/static/tpu_roofline.py`)",
    ]


def plot(path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points: dict[str, list[tuple[float, float]]] = {}
    for row in read_table("accuracy"):
        library = row["library, format"].strip("*").split(" ")[0]
        kept = float(row["same top 10"].rstrip("%"))
        megabytes = int(row["bytes"].replace(",", "")) / 1e6
        points.setdefault(library, []).append((megabytes, kept))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for library, pairs in points.items():
        style = "o-" if library == "eqquant" else "x"
        axes.plot(*zip(*sorted(pairs), strict=True), style, label=library)
    axes.set_xscale("log")
    ticks = [7.5, 10, 12.5, 15, 20, 25]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("size of the model, MB (float32: 90 MB)")
    axes.set_ylabel("ten nearest sentences kept, %")
    axes.set_title("all-MiniLM-L6-v2, quantized without training")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=pathlib.Path, help="write a plot to this file")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.plot:
        plot(options.plot)
        return
    with output(options):
        print_table(at_equal_bytes(), markdown=True)
        print("", *speed(), sep="\n")


if __name__ == "__main__":
    main()
