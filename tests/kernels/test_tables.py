"""The tables of kernels in the documentation are those of the code.

`python tests/kernels/test_tables.py` writes them.
"""

import pathlib
import re

from eqquant.kernels import cpu, gpu, table, tpu, xla


PAGE = pathlib.Path(__file__).parents[2] / "docs/internals/kernels.md"
KERNELS = {
    "cpu": cpu.KERNELS,
    "tpu": tpu.KERNELS,
    "gpu": gpu.KERNELS,
    "gpu portable": gpu.PORTABLE,
    "xla": xla.KERNELS,
}


def with_tables(text: str) -> str:
    def replace(match: re.Match) -> str:
        return f"<!-- table: {match[1]} -->\n\n{table(KERNELS[match[1]])}"

    return re.sub(
        r"<!-- table: ([\w ]+) -->\n(\n\|.*?\n(?=\n|\Z))?",
        replace,
        text,
        flags=re.DOTALL,
    )


def test_the_page_has_the_tables_of_the_code():
    text = PAGE.read_text()
    assert set(re.findall(r"<!-- table: ([\w ]+) -->", text)) == KERNELS.keys()
    assert with_tables(text) == text, "run python tests/kernels/test_tables.py"


def test_names_and_descriptions_are_complete():
    for kernels in KERNELS.values():
        assert len({kernel.name for kernel in kernels}) == len(kernels)
        for kernel in kernels:
            assert kernel.name and kernel.when and kernel.rounding and kernel.error


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
