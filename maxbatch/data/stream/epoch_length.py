"""The number of samples in an epoch, for plans, which do not read data.

Does not import Grain, so that plans need not wait for it.
"""

from __future__ import annotations

import math

from ml_collections import ConfigDict

from maxbatch.config.values import exact
from maxbatch.data.stream.mixture import MixtureSource, read_mixture
from maxbatch.data.stream.sources import num_rows_if_cached
from maxbatch.system.errors import ConfigError


def samples_per_epoch_if_cached(config: ConfigDict) -> int | None:
    """Returns the samples of an epoch if they are known without reading data, else None (a mixture has no epochs).

    Raises:
      ConfigError: `num_epochs` of a mixture.
    """
    try:
        mixture = read_mixture(config)
        if mixture is None:
            return num_rows_if_cached(config)
    except ConfigError:
        # Planning for data that are not on this machine leaves out epoch figures; training on them raises.
        return None
    refuse_num_epochs(config, mixture)
    return None


def refuse_num_epochs(config: ConfigDict, mixture: tuple[MixtureSource, ...]) -> None:
    """Raises ConfigError for `num_epochs` of a mixture, with the number of samples that it might mean, if known."""
    if config.num_epochs is None:
        return
    try:
        rows = [num_rows_if_cached(source.config) for source in mixture]
    except ConfigError:
        rows = [None]
    known = [number for number in rows if number is not None]
    samples = math.ceil(exact(config.num_epochs) * sum(known)) if len(known) == len(rows) else 10**6
    raise ConfigError(
        f"num_epochs={config.num_epochs}: num_epochs of a mixture is not defined, since each of its sources has its "
        f"own epochs; works: train_samples={samples}"
    )
