"""A config that a host refuses before it has joined the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from maxbatch.parallel.absent_tpu import tpu_version_here
from maxbatch.system.errors import ConfigError, report

# Variables in which launchers name the hosts, as JAX reads them: their number, or a list with
# commas.
_COUNTS = ("JAX_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES")
_LISTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Tells the other hosts of a run, if the environment names any, that this host refuses its
    config.
    """
    try:
        yield
    except ConfigError as error:
        if not may_have_others():
            raise
        code = report(error)
        from maxbatch.parallel.hosts import refuse_together

        refuse_together(code, str(error))
        raise SystemExit(code) from error


def may_have_others() -> bool:
    """Returns whether the environment may name other hosts; on a TPU VM JAX asks the metadata
    server.
    """
    counts = (os.environ.get(name, "") for name in _COUNTS)
    lists = [os.environ[name] for name in _LISTS if name in os.environ]
    if any(count.isdecimal() and int(count) > 1 for count in counts) or any(
        "," in hosts for hosts in lists
    ):
        return True
    return not lists and "TPU_SKIP_MDS_QUERY" not in os.environ and tpu_version_here() is not None
