"""The pytest session of a host: it runs the tests that the testing process names, phase by
phase.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import pytest
from _pytest._io import TerminalWriter
from _pytest.runner import call_and_report

from maxbatch.testing.messages import (
    Answer,
    Phase,
    Raised,
    Reported,
    SessionOptions,
    Warned,
    is_picklable,
)
from maxbatch.testing.pod import Pod, PodError


class HostSession:
    """A pytest session, opened once for all tests of a host; also its plugin.

    Args:
      connection: from which the later phases of a test are read.
    """

    name = "maxbatch-host"

    def __init__(self, options: SessionOptions, pod: Pod, connection: Connection) -> None:
        self.pod, self._connection, self._files = pod, connection, options.files
        self._errors: list[str] = []
        self._warnings: list[Warned] = []
        self._phase: Phase
        self._answer: Answer
        self._config = pytest.Config.fromdictargs(
            options.option, [*options.arguments, *options.files]
        )
        if options.worker is not None:
            self._config.workerinput = options.worker  # type: ignore[attr-defined]
        self._config.pluginmanager.register(self, self.name)

    def collect(self) -> None:
        """Starts the session and collects its files; raises PodError if one cannot be collected."""
        self._config._do_configure()
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:  # the caller's terminal reporter prints
            terminal._tw = TerminalWriter(open(os.devnull, "w"))  # noqa: SIM115  for good
        for writer in ("lfplugin", "nfplugin", "stepwiseplugin"):  # of the caller's cache
            if self._config.pluginmanager.has_plugin(writer):
                self._config.pluginmanager.unregister(name=writer)
        self._session = pytest.Session.from_config(self._config)
        self._config.hook.pytest_sessionstart(session=self._session)
        self._tests = {item.nodeid: item for item in self._session.perform_collect(self._files)}
        if self._errors:
            raise PodError("\n".join(self._errors))

    def run(self, phase: Phase) -> Answer:
        """Sets up a test, runs its phases as they are requested, and returns the answer to the
        last.
        """
        item = self._tests.get(phase.test)
        if item is None:
            return Raised(
                f"{phase.test} is not among the tests that this host collects: its parameters "
                "differ"
            )
        self._phase, self._warnings = phase, []
        try:
            # another test was to follow the last one
            self._session._setupstate.teardown_exact(item)
            if not getattr(item, "_request", True):
                item._initrequest()  # type: ignore[attr-defined]  # it runs again
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            item._request, item.funcargs = False, None  # type: ignore[attr-defined]
        except (pytest.exit.Exception, KeyboardInterrupt) as error:
            return Raised(str(error) or type(error).__name__, exits=True)
        except BaseException:
            return Raised(traceback.format_exc())
        _save_coverage()
        if isinstance(self._answer, Reported):
            return Reported(self._answer.report, tuple(self._warnings))
        return self._answer

    def close(self) -> None:
        """Tears all fixtures down and ends the session."""
        self._config.hook.pytest_sessionfinish(session=self._session, exitstatus=0)
        self._config._ensure_unconfigure()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Runs the phases of a test as they are requested, inside other plugins' wrappers."""
        phase = self._phase
        while True:
            self._answer = self._reported(item, phase)
            if phase.when == "teardown":
                return True
            self._connection.send(self._answer)
            phase = self._connection.recv()

    def _reported(self, item: pytest.Item, phase: Phase) -> Answer:
        following = (
            {"nextitem": self._tests.get(phase.following or "")} if phase.when == "teardown" else {}
        )
        report = call_and_report(item, phase.when, log=False, **following)
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        data = {key: value for key, value in data.items() if is_picklable(value)}
        data["user_properties"] = [
            pair if is_picklable(pair) else (pair[0], repr(pair[1]))
            for pair in report.user_properties
        ]
        return Reported(data)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records the error of a file that cannot be collected."""
        if report.failed:
            self._errors.append(
                f"{report.nodeid} cannot be collected on this host:\n{report.longreprtext}"
            )

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Records a warning of a test."""
        message = warning_message.message
        if when == "runtest" and isinstance(message, Warning):
            sent = (
                message
                if is_picklable(message)
                else UserWarning(f"{type(message).__name__}: {message}")
            )
            self._warnings.append(Warned(sent, warning_message.filename, warning_message.lineno))


def _save_coverage() -> None:
    """Saves coverage.py's data, since this process may be killed."""
    module = sys.modules.get("coverage")
    active = module.Coverage.current() if module is not None else None
    if active is not None:
        active.save()
