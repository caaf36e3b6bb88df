"""A pytest plugin that records the lines and the duration of each test.

It runs under `coverage run`. It writes one line of JSON per test to the file that the
environment variable TESTS_FILE names.
"""

import json
import os

import coverage
import jax
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    # Otherwise only the first test that calls a function traces it, and its lines
    # would not be recorded for later tests.
    jax.clear_caches()
    running = coverage.Coverage.current()
    running.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        running.switch_context("")


def pytest_runtest_logreport(report):
    # Workers of xdist also report to the controller.
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        test = {
            "test": report.nodeid,
            "slow": "slow" in report.keywords,
            "passed": report.passed,
            "seconds": round(report.duration, 3),
        }
        with open(os.environ["TESTS_FILE"], "a") as file:
            file.write(json.dumps(test) + "\n")
