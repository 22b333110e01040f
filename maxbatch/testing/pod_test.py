"""A marked test as seen by the testing process: its phases run on hosts, and their reports are
merged.
"""

from __future__ import annotations

import re
import time
import warnings
from typing import NamedTuple

import pytest

from maxbatch.testing.hosts import Hosts, Pool, Round, Shape, checked_timeout
from maxbatch.testing.merging import Merged, merge
from maxbatch.testing.messages import Phase, Raised, Reported, SessionOptions, When, is_picklable
from maxbatch.testing.pod import PodError

_TEARDOWN_S = 5.0  # which every test has
_REPORTS = pytest.StashKey[dict[str, Merged]]()
_POOL = pytest.StashKey[Pool]()
# Options that a host does not take from the caller: it runs the tests it is sent, and reports to
# the caller.
_OWN_OPTIONS: dict[str, object] = {
    "capture": "no",
    "usepdb": False,
    "trace": False,
    "setuponly": False,
    "setupshow": False,
    "setupplan": False,
    "collectonly": False,
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "plugins": [],
    "numprocesses": None,
    "maxprocesses": None,
    "dist": "no",
    "tx": [],
    "distload": False,
    "cov_source": [],
    "log_file": None,
    "xmlpath": None,
    "htmlpath": None,
    "report_log": None,
}


class _Stated(NamedTuple):
    shape: Shape
    timeout: float


def stated_by(marker: pytest.Mark) -> _Stated:
    """Returns the shape and the timeout that `@pytest.mark.pod` states.

    Raises:
      ValueError: arguments other than `devices`, `hosts` and `timeout`, or unusable values.
    """

    def pod(devices: int, hosts: int = 1, timeout: float = 60.0) -> _Stated:
        return _Stated(Shape.of(devices, hosts), checked_timeout(timeout))

    try:
        return pod(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"@pytest.mark.pod: {str(error).replace(pod.__qualname__, 'pod')}"
        ) from error


class PodTest:
    """A test whose phases run on hosts.

    Args:
      item: the test; its own phases are replaced.
    """

    def __init__(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        self._item, self._nextitem = item, nextitem
        self._hosts: Hosts | None = None
        self._until = 0.0
        self._timeout = 0.0
        self._sections: list[tuple[str, str]] = []
        item.stash[_REPORTS] = {}
        vars(item).update(setup=self._setup, runtest=self._call, teardown=self._teardown)

    def _setup(self) -> None:
        marker = self._item.get_closest_marker("pod")
        assert marker is not None
        try:
            shape, self._timeout = stated_by(marker)
        except ValueError as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        self._sections = []
        self._hosts = hosts = _pool(self._item.session).get(shape)
        if not hosts.are_alive:
            self._report("setup", hosts.started)
        hosts.is_in_test = True
        self._until = time.monotonic() + self._timeout
        name = re.sub(r"\W", "_", self._item.name)[:30]
        self._folder = _temporary_folders(self._item.config).mktemp(name)
        self._perform("setup")

    def _call(self) -> None:
        self._perform("call")

    def _teardown(self) -> None:
        hosts, self._hosts = self._hosts, None
        if hosts is None or not hosts.are_alive:
            return
        self._hosts, self._until = hosts, max(self._until, time.monotonic() + _TEARDOWN_S)
        self._perform("teardown")
        hosts.is_in_test = False

    def _perform(self, when: When) -> None:
        assert self._hosts is not None
        phase = Phase(when, self._item.nodeid, self._following(), self._folder)
        too_late = f"after {self._timeout:g} s, the timeout of the test"
        self._report(when, self._hosts.perform(phase, self._until, too_late))

    def _report(self, when: When, outcome: Round) -> None:
        """Stores the report for pytest; raises PodError if a host failed."""
        assert self._hosts is not None
        for host, answer in outcome.answers.items():
            if isinstance(answer, Raised) and answer.exits:
                self._hosts.kill()
                pytest.exit(f"host {host}: {answer.text}")
        merged = merge(self._item, when, outcome)
        self._sections += merged.sections
        output = self._hosts.output()
        self._sections += [
            (f"Captured output of host {host}, {when}", text) for host, text in output.items()
        ]
        merged.sections = list(self._sections)
        self._item.stash[_REPORTS][when] = merged
        self._warn(outcome)
        if merged.raises:
            raise PodError(f"the {when} failed on a host")

    def _warn(self, outcome: Round) -> None:
        every = [
            warning
            for answer in outcome.answers.values()
            if isinstance(answer, Reported)
            for warning in answer.warnings
        ]
        for text, file, line in dict.fromkeys(
            (str(warning.message), warning.file, warning.line) for warning in every
        ):
            message = next(warning.message for warning in every if str(warning.message) == text)
            self._item.config.hook.pytest_warning_recorded.call_historic(
                kwargs={
                    "warning_message": warnings.WarningMessage(message, type(message), file, line),
                    "when": "runtest",
                    "nodeid": self._item.nodeid,
                    "location": None,
                }
            )

    def _following(self) -> str | None:
        """Returns the id of the next test in this file, or else of the next test with this
        shape.
        """
        if self._nextitem is None:
            return None
        if self._nextitem.path == self._item.path:
            return self._nextitem.nodeid
        items = self._item.session.items
        later = items[items.index(self._item) + 1 :]
        shape = shape_of(self._item)
        return next((item.nodeid for item in later if shape_of(item) == shape), None)


def shape_of(item: pytest.Item) -> Shape | None:
    """Returns the shape of a marked test; None if it is not marked, or marked wrongly."""
    marker = item.get_closest_marker("pod")
    try:
        return stated_by(marker).shape if marker is not None else None
    except ValueError:
        return None


def report_of(item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
    """Returns the merged report of a phase; None if the phase did not reach the hosts."""
    merged = item.stash.get(_REPORTS, {}).pop(call.when, None)
    if merged is None:
        return None
    report = pytest.TestReport.from_item_and_call(item, call)
    report.outcome, report.longrepr = merged.outcome, merged.longrepr
    report.sections, report.user_properties = merged.sections, merged.user_properties
    if merged.wasxfail is not None:
        report.wasxfail = merged.wasxfail
    return report


def close_pool(config: pytest.Config) -> None:
    """Ends the hosts of all tests; warns about fixtures whose teardown failed."""
    pool = config.stash.get(_POOL, None)
    for failure in pool.close() if pool is not None else []:
        text = f"host {failure.host}, at the end of its session: {failure.what}\n{failure.text}"
        config.issue_config_time_warning(pytest.PytestWarning(text.rstrip()), 2)


def _pool(session: pytest.Session) -> Pool:
    stash = session.config.stash
    if _POOL not in stash:
        stash[_POOL] = Pool(lambda shape: _start(session, shape))
    return stash[_POOL]


def _start(session: pytest.Session, shape: Shape) -> Hosts:
    config = session.config
    folder = _temporary_folders(config).mktemp("pod")
    files = list(dict.fromkeys(str(item.path) for item in session.items if shape_of(item) == shape))
    arguments = [word for name in config.option.plugins for word in ("-p", name)]
    given = {name: value for name, value in vars(config.option).items() if is_picklable(value)}
    option = {
        name: value
        for name, value in (given | _OWN_OPTIONS).items()
        if name in given and name != "file_or_dir"
    }
    # A host imports this package before pytest can rewrite its asserts.
    option["pythonwarnings"] = [
        *(option["pythonwarnings"] or []),
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    option |= {
        "rootdir": str(config.rootpath),
        "inifilename": str(config.inipath) if config.inipath else None,
    }
    worker = getattr(config, "workerinput", None)

    def options(host: int) -> SessionOptions:
        return SessionOptions(
            option | {"basetemp": str(folder / f"host{host}")}, arguments, worker, files
        )

    return Hosts(
        shape, options, config.invocation_params.dir, shows_output=config.option.capture == "no"
    )


def _temporary_folders(config: pytest.Config) -> pytest.TempPathFactory:
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory
