"""A config that one of several hosts refuses, before it knows the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from maxbatch.system.errors import ConfigError, report


@contextlib.contextmanager
def refusing_together() -> Iterator[None]:
    """Tells the other hosts of a run, if the environment names any, of a config that this one refuses."""
    try:
        yield
    except ConfigError as error:
        count = os.environ.get("JAX_NUM_PROCESSES", "")
        if not (count.isdecimal() and int(count) > 1):
            raise
        code = report(error)
        from maxbatch.parallel.hosts import refuse_together

        refuse_together(code, str(error))
        raise SystemExit(code) from error
