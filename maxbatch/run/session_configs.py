"""The config that each update of a run had: `config.yml` has that of the last session, and
`sessions.jsonl` the keys that every session changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from maxbatch.config.config import Config
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value
from maxbatch.run.folder.sessions import Changed, Session


class _Owned(NamedTuple):
    """The config of the updates from one step on."""

    first_step: int
    config: Config


class SessionConfigs:
    """The configs of a run's updates.

    Args:
      config: the one of its last session.
      sessions: oldest first.

    Attributes:
      first_known: the first update whose config is known; sessions of an older maxbatch do not
        state the keys that they changed.
    """

    def __init__(self, config: Config, sessions: Sequence[Session]) -> None:
        self._config, self._sessions = config, sessions
        self.first_known = self._owned[-1].first_step

    def at(self, step: int) -> Config | None:
        """Returns the config of an update; None if it is not known."""
        known = (owned.config for owned in self._owned if owned.first_step <= step)
        return next(known, None)

    @cached_property
    def _owned(self) -> list[_Owned]:
        """The configs of the sessions that trained, the last first, back to the first one that is
        known.
        """
        config, owned = self._config, list[_Owned]()
        for session in reversed(self._sessions):
            if session.first_step is None:
                continue  # it ended before it stated its config
            if (session.last_step or 0) >= session.first_step:
                owned.append(_Owned(session.first_step, config))
            if session.changed is None:
                if session.first_step == 1:
                    break  # nothing before it is left in the run
                return owned or [_Owned(session.first_step, config)]
            config = config.replaced(_before(session.changed))
        return [*owned, _Owned(1, config)]


def _before(changed: Changed) -> dict[str, Value]:
    """Returns the values before a session of the keys that it changed and that change updates.

    Places of data and of models are those of the last session: their content is pinned, and they
    may have moved since.
    """
    return {
        name: None if before is None else KEYS[name].read(before, plain=False)
        for name, (before, _) in changed.items()
        if name in KEYS and KEYS[name].changes and KEYS[name].kind != "path"
    }
