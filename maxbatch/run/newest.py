"""The newest saved step of a run, for messages about its end; no JAX."""

from __future__ import annotations

from maxbatch.config.sections import CheckpointConfig
from maxbatch.run.folder.position import last_saved
from maxbatch.run.folder.run_folder import WARM_START
from maxbatch.system.storage.storage import as_path


def newest_saved(run_dir: str, config: CheckpointConfig) -> int | None:
    """Returns the newest saved step of a run, over its checkpoints and its local ones, or else of
    its warm start; None if there is none.
    """
    if not config.enable_checkpointing:
        return None
    folder = as_path(run_dir)
    steps = [last_saved(folder)]
    if config.local_checkpoint_directory:
        # late, so that a run without them does not load their modules
        from maxbatch.run.weights.local_files import saved_here

        steps.append(saved_here(config.local_checkpoint_directory, folder))
    saved = [step for step in steps if step is not None]
    # A warm start is over once the run has a step of its own.
    return max(saved) if saved else last_saved(folder / WARM_START)
