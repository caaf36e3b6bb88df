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


def test_the_workflow_runs_all_checks():
    jobs = load(".github/workflows/ci.yml")["jobs"]
    commands = [s["run"] for job in jobs.values() for s in job["steps"] if "run" in s]
    (script,) = [c for c in commands if c.startswith(".ci/")]
    assert (ROOT / script).stat().st_mode & 0o111
