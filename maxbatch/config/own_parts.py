"""The key `own_parts`: the user's own parts of a run, which only `maxbatch.train` in Python can be
given.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError

# arguments of `maxbatch.train`
PARTS = ("model", "objective", "optimizer", "stream", "eval_stream", "outputs")
TRAINED = PARTS[:-1]  # without which another run would be trained


def own_parts_text(names: Mapping[str, str]) -> str:
    """Returns the value of `own_parts`, such as `model: mine.Net, stream: mine.Rows`, from names by
    argument.
    """
    return ", ".join(f"{argument}: {names[argument]}" for argument in PARTS if argument in names)


def own_parts_of(text: str) -> dict[str, str]:
    """Returns the names of the parts by argument; raises ConfigError for text of another form."""
    names: dict[str, str] = {}
    for part in filter(None, text.split(", ")):
        argument, colon, name = part.partition(": ")
        if not colon or argument not in PARTS or not name:
            raise ConfigError(
                f"own_parts={shown(repr(text))}: must be parts and their names, as "
                "`maxbatch.train` writes them; works: own_parts='stream: mine.Rows'"
            )
        names[argument] = name
    return names


def refuse_own_parts(
    text: str, needed: Collection[str] = TRAINED, given: Collection[str] = ()
) -> None:
    """Raises ConfigError for a config of own parts that are missing here.

    Args:
      needed: arguments of the parts that must be here, if the run has them.
      given: arguments of the parts that are here.
    """
    names = own_parts_of(text)
    missing = {
        argument: names[argument]
        for argument in needed
        if argument in names and argument not in given
    }
    if missing:
        arguments = ", ".join(
            f"{argument}={name.rpartition('.')[2]}" for argument, name in missing.items()
        )
        raise ConfigError(
            f"own_parts={shown(repr(text))}: the config is of a run with "
            f"{own_parts_text(missing)}, which a command cannot load; works: "
            f"maxbatch.train(config, {arguments}) in Python, or own_parts='' for the config's own"
        )
