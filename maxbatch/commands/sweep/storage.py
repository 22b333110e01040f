"""The database of a study: the meaning of its failures, and the time limit of opening it."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError, TrainingError

_OPENING_S = 60.0
# The databases' words for temporary failures: the URL is right, and the same command may work later.
_LATER = re.compile(r"locked|busy|timed? ?out|refused|unreachable|reset|gone away|is full|no space|too many", re.I)
_LONGEST = 160  # characters of a database's message

T = TypeVar("T")


class Storage(NamedTuple):
    """An Optuna storage, by its name in messages."""

    name: str
    remedy: str  # the advice where the storage itself is at fault

    @classmethod
    def of(cls, url: str | None, file: Path) -> Storage:
        """Returns the storage of a URL, or of the file that a sweep without one has."""
        if url is None:
            return cls(str(file), "restore it, or remove it: the trials in sweep_dir are then added to a new one")
        shown_url = re.sub(r"://[^@/]*@", "://...@", url)  # without the password
        return cls(f"storage={shown(shown_url)}", "works: storage: sqlite:///sweep.db")

    def open(self, opened: Callable[[], T]) -> T:
        """Returns the result of `opened`, within a minute.

        Raises:
          ConfigError: the storage cannot be used.
          TrainingError: it is locked, or does not respond.
        """
        results: list[T] = []
        errors: list[Exception] = []

        def attempt() -> None:
            try:
                results.append(opened())
            except Exception as error:  # of the database's own library
                errors.append(error)

        thread = threading.Thread(target=attempt, name="maxbatch-storage", daemon=True)
        thread.start()
        thread.join(_OPENING_S)
        if errors:
            raise self._meaning("cannot be opened", errors[0])
        if not results:
            raise TrainingError(f"{self.name}: has not answered within {_OPENING_S:g} s; run the same command again")
        return results[0]

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns failures of the database in its block into the errors that `open` raises."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (StorageInternalError, SQLAlchemyError) as error:
            raise self._meaning("cannot be used", error) from None

    def _meaning(self, fate: str, error: BaseException) -> ConfigError | TrainingError:
        first = error
        while first.__cause__ is not None:
            first = first.__cause__
        said = " ".join(str(getattr(first, "orig", None) or first).split())[:_LONGEST]
        said = re.sub(r"://[^@/\s]*@", "://...@", said) or type(first).__name__
        if _LATER.search(said):
            return TrainingError(f"{self.name}: {fate} ({said}); run the same command again")
        return ConfigError(f"{self.name}: {fate} ({said}); {self.remedy}")
