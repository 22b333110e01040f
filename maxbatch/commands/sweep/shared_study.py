"""The study of a sweep that several machines shared with maxbatch 0.4, in their database, which is
only read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    import optuna

_LONGEST = 160  # characters of a database's message


def shared_trials(library: ModuleType, sweep: SweepFile) -> Sequence[optuna.trial.FrozenTrial]:
    """Returns the trials of a study in the database that a sweep file names as `storage`, by the
    library Optuna.

    Raises:
      ConfigError: the study cannot be read, or is of other parameters.
    """
    assert sweep.storage is not None
    place = f"storage={shown(_without_password(sweep.storage))}: study {sweep.path.stem}"
    now = {parameter.key.name: parameter.to_json() for parameter in sweep.parameters}
    try:
        database = library.storages.RDBStorage(sweep.storage, skip_table_creation=True)
        study = library.load_study(study_name=sweep.path.stem, storage=database)
        trials: list[optuna.trial.FrozenTrial] = study.get_trials(deepcopy=False)
        before = json.loads(study.user_attrs["maxbatch_parameters"])["parameters"]
    except Exception as error:  # of Optuna, SQLAlchemy or the library of the database
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (
            " ".join(str(getattr(cause, "orig", None) or cause).split())[:_LONGEST]
            or type(cause).__name__
        )
        raise ConfigError(
            f"{place} cannot be read ({_without_password(reason)}); "
            "without storage, the trials in sweep_dir and new ones are the sweep"
        ) from None
    if before != now:
        raise ConfigError(
            f"{place} has the parameters {before}, not {now}; works: another sweep, without storage"
        )
    return trials


def _without_password(text: str) -> str:
    return re.sub(r"://[^@/\s]*@", "://...@", text)
