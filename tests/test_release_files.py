"""Files for releases and for the host of the repository."""

import pathlib
import re

import eqquant
import pytest


ROOT = pathlib.Path(__file__).parent.parent
yaml = pytest.importorskip("yaml")


def load(name: str):
    return yaml.safe_load((ROOT / name).read_text())


def test_citation_has_the_version():
    citation = load("CITATION.cff")
    assert citation["version"] == eqquant.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_issue_template_asks_for_the_environment():
    fields = {field["id"]: field for field in load(TEMPLATE)["body"]}
    description = fields["environment"]["attributes"]["description"]
    (command,) = re.findall(r'python -c "(.*)"', description)
    exec(command, {})


TEMPLATE = ".github/ISSUE_TEMPLATE/bug.yml"


def commands_of_the_workflow() -> list[str]:
    jobs = load(".github/workflows/ci.yml")["jobs"]
    return [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]


def test_the_workflow_builds_and_tests_wheels():
    targets = [c.split()[1] for c in commands_of_the_workflow() if "make" in c]
    assert targets == ["wheels", "test-wheels"]
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        (script,) = re.findall(
            rf"^{target}:\n(?:\t.*\n)*?\t.*(\.ci/\S+)", makefile, re.M
        )
        assert (ROOT / script).stat().st_mode & 0o111


def test_the_workflow_runs_all_checks():
    commands = commands_of_the_workflow()
    (script,) = [c for c in commands if c.startswith(".ci/")]
    assert (ROOT / script).stat().st_mode & 0o111
