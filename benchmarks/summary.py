"""Summarize the tables of `docs/benchmarks/tables` for README.md and the home page.

    python benchmarks/summary.py
    python benchmarks/summary.py --platforms
    python benchmarks/summary.py --plot docs/images/accuracy.png
    python benchmarks/summary.py --plot-language docs/images/language-accuracy.png

With `--output`, the first two write `summary.md` and `platforms.md` in that folder. The
home page includes these files, and a test requires that README.md contains the same
text. The plots show accuracy against bits per weight for all rows of `accuracy.md`, and
divergence for the rows of `language-accuracy.md` and `language-accuracy-gemma.md`.
"""

import argparse
import pathlib
from typing import Any

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


def platforms() -> list[list[str]]:
    """Compare 8 rows by an NF4 weight with the alternatives on each platform."""
    cpu = {row["library: format"]: row for row in read_table("peers-zen4-4096")}
    ms = lambda name: f"{int(cpu[name]['M=8']) / 1000:.1f} ms"
    tpu = {
        (row["M"], row["format"], row["variant"]): row
        for row in read_table("tpu-14336")
    }
    times = lambda chip: tpu["8", "nf4", "high"][chip].split(", ")[1]
    gpu = {(row["format"], row["rows of x"]): row for row in read_table("gpu-h200")}
    return [
        ["platform", "kernels", "8 rows by an NF4 weight", "evidence"],
        [
            "CPU, x86-64",
            "C++: AVX2, AVX-512, VNNI, AMX",
            f"{ms('eqquant: nf4')}; llama.cpp q4_0 {ms('llama.cpp: q4_0')}, "
            f"bitsandbytes NF4 {ms('bitsandbytes: nf4, float32')}, dense float32 "
            f"{ms('eqquant: dense float32')}",
            "measured: 4096 x 4096, two cores of an AMD EPYC (Zen 4), "
            "`benchmarks/peers.py`",
        ],
        [
            "CPU, ARM",
            "C++: NEON, dotprod, i8mm",
            "",
            "results tested in an emulator, speed not measured",
        ],
        [
            "TPU, v4 to TPU7x",
            "Pallas",
            f"{times('v5e')} times as fast as dense bfloat16 on v5e, {times('v6e')} "
            "times on v6e",
            "compiled, and estimated from the schedule: 4096 x 14336, "
            "`benchmarks/static/tpu_roofline.py`",
        ],
        [
            "GPU: A100, H100, H200, RTX 4090",
            "Pallas: Triton, Mosaic",
            f"{gpu['nf4', '16']['dense / eqquant']} times as fast as dense bfloat16 on "
            "H200 (16 rows)",
            "measured on an H200 and an H100, and compiled for the others: 4096 x "
            "14336, `benchmarks/gpu.py`",
        ],
    ]


def pyplot() -> Any:
    """Import pyplot without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot(path: pathlib.Path) -> None:
    plt = pyplot()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in read_table("accuracy"):
        library = row["library, format"].strip("*").split(" ")[0]
        kept = float(row["same top 10"].rstrip("%"))
        points.setdefault(library, []).append((float(row["bits per weight"]), kept))
    figure, axes = plt.subplots(figsize=(5.6, 4.2), layout="constrained")
    ours = sorted(points.pop("eqquant"))
    axes.plot(*zip(*ours, strict=True), "o-", label="eqquant", zorder=3)
    for marker, (library, pairs) in zip("sv^D", points.items(), strict=True):
        axes.plot(*zip(*pairs, strict=True), marker, label=library, alpha=0.8)
    row = next(row for row in at_equal_bytes() if row[0] == "llama.cpp q4_K")
    bits, *kept = (float(cell.strip("*%")) for cell in row[1:])
    axes.annotate(
        f"{bits:.2f} bits: eqquant {kept[1]:.1f}%,\nllama.cpp q4_K {kept[0]:.1f}%",
        (bits, kept[1]),
        (2.6, 96),
        arrowprops={"arrowstyle": "->", "shrinkB": 5},
    )
    axes.plot([bits, bits], kept, color="k", linewidth=1)
    axes.set_xlabel("bits per weight, of the whole model")
    axes.set_ylabel("ten nearest sentences kept, %")
    axes.set_title("all-MiniLM-L6-v2 at equal bytes, without training")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


# The kinds of rows of a language model: a part of the name, a marker and a label.
LANGUAGE = {
    "with trellis": ("o-", "eqquant, several formats"),
    "calibrated": ("^", "eqquant, one format, calibrated"),
    "tuned": ("*", "eqquant, one format, AutoRound"),
    "corrected": ("<", "eqquant, one format, GPTAQ"),
    "llama.cpp": ("s", "llama.cpp, importance matrix"),
    "GPTQModel": ("D", "GPTQModel"),
    "AutoRound": ("P", "AutoRound"),
    "HQQ": ("v", "HQQ, also by torchao"),
    "torchao int4": ("x", "torchao"),
}


def plot_language(path: pathlib.Path) -> None:
    plt = pyplot()
    models = {
        "language-accuracy": "SmolLM2-135M-Instruct",
        "language-accuracy-gemma": "Gemma 3 270M",
    }
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.8), layout="constrained")
    for axes, (table, title) in zip(panels, models.items(), strict=True):
        points: dict[str, list[tuple[float, float]]] = {kind: [] for kind in LANGUAGE}
        for row in read_table(table):
            kind = next((kind for kind in LANGUAGE if kind in row["weights"]), None)
            divergence = float(row["KL mean"])
            if kind is not None and divergence > 0:  # The axis is logarithmic.
                points[kind].append((float(row["bits"]), divergence))
        for i, (kind, (marker, label)) in enumerate(LANGUAGE.items()):
            if points[kind]:
                x, y = zip(*sorted(points[kind]), strict=True)
                axes.plot(x, y, marker, label=label, color=f"C{i}")
        axes.set_yscale("log")
        axes.set_xlabel("bits per weight, of the whole model")
        axes.set_title(title)
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("mean KL divergence from the float model, nats")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=pathlib.Path, help="write a plot to this file")
    parser.add_argument(
        "--plot-language",
        type=pathlib.Path,
        help="write a plot of language models to this file",
    )
    parser.add_argument(
        "--platforms", action="store_true", help="print the table of platforms"
    )
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.plot:
        plot(options.plot)
    if options.plot_language:
        plot_language(options.plot_language)
    if options.plot or options.plot_language:
        return
    with output(options):
        print_table(platforms() if options.platforms else at_equal_bytes(), True)


if __name__ == "__main__":
    main()
