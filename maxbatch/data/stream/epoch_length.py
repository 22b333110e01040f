"""How many samples an epoch has, for those who plan without reading data.

Imports no Grain, which plans need not wait for.
"""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from maxbatch.config.values import exact
from maxbatch.data.stream.mixture import MixtureSource, read_mixture
from maxbatch.data.stream.sources import num_rows_if_cached
from maxbatch.system.errors import ConfigError


def samples_per_epoch_if_cached(config: ConfigDict) -> int | None:
    """Returns the samples of an epoch where they are known without reading data, else None (a mixture has no
    epochs). Imports no Grain.

    Raises:
      ConfigError: `num_epochs` of a mixture.
    """
    try:
        mixture = read_mixture(config)
        if mixture is None:
            return num_rows_if_cached(config)
    except ConfigError:
        # Who plans for data that are not here has no epoch figures; who trains on them gets the message.
        return None
    refuse_num_epochs(config, mixture)
    return None


def refuse_num_epochs(config: ConfigDict, mixture: tuple[MixtureSource, ...]) -> None:
    """Refuses `num_epochs` of a mixture; the message names all rows of all sources so many times, where they are
    known."""
    if config.num_epochs is None:
        return
    try:
        rows = [num_rows_if_cached(source.config) for source in mixture]
    except ConfigError:
        rows = [None]
    known = [number for number in rows if number is not None]
    samples = math.ceil(exact(config.num_epochs) * sum(known)) if len(known) == len(rows) else 10**6
    raise ConfigError(
        f"num_epochs={config.num_epochs}: num_epochs of a mixture is not defined, since each of its sources has "
        f"epochs of its own; works: train_samples={samples}"
    )
