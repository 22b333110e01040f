"""The phases of a run's start: `python -m benchmarks.startup_phases OUT.json SECONDS_OF_START
KEY=VALUE ...`.

Does what `maxbatch train` does up to its first executable, importing one library after the other,
and writes the seconds of each phase.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

_LIBRARIES = (
    "numpy",
    "jax",
    "flax.nnx",
    "optax",
    "grain",
    "maxbatch.run.record.board",
    "rich.console",
)


def main(output: str, began: str, *overrides: str) -> None:
    """Writes the seconds of each phase to `output`."""
    seconds: dict[str, float] = {}
    last = float(began)

    def passed(phase: str) -> None:
        nonlocal last
        seconds[phase] = time.time() - last
        last = time.time()

    passed("start Python")
    for library in _LIBRARIES:
        importlib.import_module(library)
        passed(f"import {library}")
    from maxbatch.run.compile.cache import use_persistent_cache
    from maxbatch.run.context import RunContext
    from maxbatch.run.pretraining import open_pretraining
    from maxbatch.run.session import Session

    passed("import the rest of maxbatch")
    import jax

    from maxbatch.config.loading import load_config
    from maxbatch.data.store.cache_folder import cache_folder
    from maxbatch.data.stream.stream import open_stream

    config = load_config(overrides=overrides)
    passed("config")
    use_persistent_cache(config.compilation_cache_dir, cache_folder(config.data_cache_dir, "xla"))
    devices = jax.devices()
    passed("devices")
    stream = open_stream(config)
    stream.read(0, 1)
    passed("data")
    with ExitStack() as stack:
        context = RunContext(config, devices, stack)
        session = Session(context, open_pretraining(context))
        passed("session")
        assert session.built is not None, "a new run has updates left"
        session.built.run(None, lambda step, name, text: None, stack)
        passed("state, compile the update")
    Path(output).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
