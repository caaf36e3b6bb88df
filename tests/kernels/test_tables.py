"""The tables of kernels in the documentation are those of the code.

`python tests/kernels/test_tables.py` writes them.
"""

import pathlib
import re

from eqquant.kernels import cpu, gpu, table, tpu, xla


FOLDER = pathlib.Path(__file__).parents[2] / "docs/internals"
PAGE, RULES = FOLDER / "kernels.md", FOLDER / "cpu-kernels.md"
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


def with_rules(text: str) -> str:
    for name, lines in (
        ("rules", cpu.describe_rules()),
        ("limits", cpu.describe_limits()),
    ):
        start, found, rest = text.partition(f"<!-- {name}: cpu -->\n")
        assert found, f"the page has no place for the {name}"
        rest = re.sub(r"\A\n```text\n.*?\n```\n", "", rest, flags=re.DOTALL)
        text = f"{start}{found}\n```text\n{lines}\n```\n{rest}"
    return text


def test_cpp_and_python_read_the_same_limits():
    header = (pathlib.Path(cpu.__file__).parent / "src/runtime/limits.h").read_text()
    rows = [line for line in header.splitlines() if line.startswith("EQQUANT_LIMIT(")]
    assert [limit.name for limit in cpu.limits()] == [
        row[14:].split(",")[0] for row in rows
    ]
    sources = pathlib.Path(cpu.__file__).parent.glob("src/**/*.*")
    used = set(re.findall(r"limits::(\w+)", "".join(p.read_text() for p in sources)))
    assert used == {limit.name for limit in cpu.limits()}


def test_the_page_of_rules_has_the_rules_of_the_code():
    text = RULES.read_text()
    assert with_rules(text) == text, "run python tests/kernels/test_tables.py"


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
    RULES.write_text(with_rules(RULES.read_text()))
