"""The pytest plugin: the marker `pod`, whose tests run on the hosts of a simulated pod, and the
fixture `pod`.

Every pytest session loads it if maxbatch is installed, so it imports the modules of pods only at
the first marked test.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from maxbatch.testing.pod import Pod

_HOST = "maxbatch-host"  # the name of the plugin of a host's session


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "pod(devices, hosts=1, timeout=60): runs the test once on each host of a simulated pod of "
        "CPU devices, with jax.distributed initialised; the fixture `pod` describes it "
        "(maxbatch.testing)",
    )


@pytest.fixture(scope="session")
def pod(request: pytest.FixtureRequest) -> Pod:
    """Returns the pod of a test with the marker `pod`, as seen by one of its hosts."""
    host = request.config.pluginmanager.get_plugin(_HOST)
    if host is None:
        pytest.fail(
            "the fixture pod needs the marker: @pytest.mark.pod(devices=4, hosts=2)", pytrace=False
        )
    pod: Pod = host.pod
    return pod


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuses a debugger beside marked tests: it would stop in this process, where the test does
    not run.
    """
    given = [
        flag
        for flag, name in (("--pdb", "usepdb"), ("--trace", "trace"))
        if session.config.getoption(name, False)
    ]
    marked = next(
        (item for item in session.items if item.get_closest_marker("pod") is not None), None
    )
    if given and marked is not None:
        raise pytest.UsageError(
            f"{given[0]}: cannot reach the hosts of {marked.nodeid}; works: {given[0]} -m 'not pod'"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Runs the phases of a marked test on hosts."""
    if item.get_closest_marker("pod") is not None and not item.config.pluginmanager.has_plugin(
        _HOST
    ):
        from maxbatch.testing.pod_test import PodTest

        PodTest(item, nextitem)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> pytest.TestReport | None:
    """Returns the report of all hosts for a marked test."""
    if item.get_closest_marker("pod") is None or item.config.pluginmanager.has_plugin(_HOST):
        return None
    from maxbatch.testing.pod_test import report_of

    return report_of(item, call)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if any(item.get_closest_marker("pod") is not None for item in getattr(session, "items", [])):
        from maxbatch.testing.pod_test import close_pool

        close_pool(session.config)
