"""A pytest plugin of mutants.py: under `coverage run`, which test runs which lines, and
what each test takes. Into the file that TESTS_FILE names goes a line of JSON a test."""

import json
import os

import coverage
import jax
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    # Otherwise a function is traced by the first test that calls it, and for all the
    # others that depend on it none of its lines would be noted.
    jax.clear_caches()
    running = coverage.Coverage.current()
    running.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        running.switch_context("")


def pytest_runtest_logreport(report):
    # The workers of xdist report, too, to the one process that is none of them.
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        test = {
            "test": report.nodeid,
            "slow": "slow" in report.keywords,
            "passed": report.passed,
            "seconds": round(report.duration, 3),
        }
        with open(os.environ["TESTS_FILE"], "a") as file:
            file.write(json.dumps(test) + "\n")
