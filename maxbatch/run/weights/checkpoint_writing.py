"""The files of a run's checkpoints, written in a thread while training goes on.

Each host writes the shards of which it has the first replica, and reports them to the first host,
which writes the indices and the small files, and commits. On a disk a checkpoint is built in a
folder of another name, and renamed. In a store, whose folders cannot be renamed, a file that is
written last marks a whole checkpoint.

A writer can be suspended between the check of its lease and a write, and go on while another
process trains in the folder. So data files have names of this start of the run alone, small files
are written through the run's fence, and the file that marks a checkpoint is moved from a folder of
this start alone. The next holder of the lease removes that folder first, so that a suspended writer
has nothing to move.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from maxbatch.parallel.hosts import report_to_first
from maxbatch.parallel.trees import Tree
from maxbatch.run.folder.best_checkpoint import BEST, BestCheckpoint
from maxbatch.run.folder.foreign import foreign_best, is_own
from maxbatch.run.folder.position import COMMITTED_FILE, is_committed, is_step
from maxbatch.run.weights.shard_files import INDEX, Files, index_of, write_blocks
from maxbatch.run.weights.shards import blocks_here, forms_of
from maxbatch.system.errors import ConfigError, LeaseLost, TrainingError, one_line, writing
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.storage.fences import BUILDING, ask
from maxbatch.system.storage.storage import AnyPath, is_remote, move_tree, remove_tree, subfolders
from maxbatch.system.terminal.warning import warn_once

Failure = tuple[int, str, bool]  # the host, its message, and whether the input is at fault


def remove_unfinished(folder: AnyPath) -> None:
    """Removes remains of other starts' saves from a run's `checkpoints/`, and nothing of other
    programs.

    Folders of other names than steps go first, so that a suspended start cannot commit any more.
    """
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(subfolders(folder), key=lambda name: not name.startswith(BUILDING)):
            if name.startswith(BUILDING) or (
                _is_unfinished(folder / name) and is_own(folder / name)
            ):
                remove_tree(folder / name)


def _is_unfinished(folder: AnyPath) -> bool:
    """Returns whether a folder's name is that of a checkpoint that was not committed."""
    return is_step(folder.name) and not is_committed(folder)


class Save:
    """One save of a run: its blocks, copied from the devices, and its files.

    Args:
      token: the start's own, the same on all hosts.
      step: names the checkpoint.
      items: arrays, by the name of their folder.
      small: the content of further files, by their paths in the checkpoint.
      old: steps of checkpoints to remove once this one is committed.
      best: the new content of `checkpoints/best`; None: it stays.
      on_commit: called with the step, before they are removed.

    Attributes:
      may_be_committed: whether the first host has begun to commit.
      is_best_foreign: whether `checkpoints/best` is another program's, and was left as it is.
    """

    def __init__(
        self,
        folder: AnyPath,
        token: str,
        step: int,
        items: Mapping[str, Tree],
        small: Mapping[str, bytes],
        old: list[int],
        best: BestCheckpoint | None = None,
        on_commit: Callable[[int], None] | None = None,
    ) -> None:
        self._on_commit = on_commit
        self._folder, self._token, self._step, self._small, self._old = (
            folder,
            token,
            step,
            small,
            old,
        )
        self._best = best
        self._place = folder / str(step) if is_remote(folder) else self._own(step)
        self._forms = {item: forms_of(tree) for item, tree in items.items()}
        self._blocks = {
            item: blocks_here(jax.tree.leaves(tree), of_all_hosts=True)
            for item, tree in items.items()
        }
        self._error: Exception | None = None
        self.may_be_committed = self.is_best_foreign = False

    def _own(self, step: int) -> AnyPath:
        """Returns a folder of this start of the run alone."""
        return self._folder / f"{BUILDING}{self._token}-{step}"

    def run(self) -> None:
        """Writes this host's blocks; the first host completes the checkpoint once all have.

        Raises:
          ConfigError, TrainingError: a host failed; earlier checkpoints are whole.
        """
        files = self._attempt(self._write_blocks)
        failure = report_to_first((files, self._failure), self._commit, "checkpoint")
        if self._error:
            raise self._error
        if failure:
            host, message, is_input = failure
            raise (ConfigError if is_input else TrainingError)(f"host {host}: {message}")

    def _attempt(self, do: Callable[[], Any]) -> Any:
        """Returns the result of a function, or keeps its error, since other hosts wait for this
        one.
        """
        try:
            with writing(self._folder):
                return do()
        except Exception as error:
            self._error = error
        with contextlib.suppress(ConfigError, OSError):
            try:
                ask(str(self._place))
            except LeaseLost as lost:  # the failure may come from the folder's new holder
                self._error = lost
        return None

    @property
    def _failure(self) -> Failure | None:
        if self._error is None:
            return None
        return jax.process_index(), one_line(self._error), isinstance(self._error, ConfigError)

    def _write_blocks(self) -> dict[str, Files]:
        name = f"{self._token}-{jax.process_index()}"
        return {
            item: write_blocks(self._place / item, name, self._blocks.pop(item))
            for item in self._forms
        }

    def _commit(self, reports: list[tuple[dict[str, Files], Failure | None]]) -> Failure | None:
        """Completes the checkpoint on the first host, or discards it; returns the failure of a
        host.
        """
        failure = next((failure for _, failure in reports if failure), None)
        if failure is None:
            self._attempt(lambda: self._complete([files for files, _ in reports]))
            failure = self._failure
        if failure and not self.may_be_committed and not is_remote(self._place):
            remove_tree(self._place)  # of a store, which may not answer, the next start does
        return failure

    def _complete(self, files: list[dict[str, Files]]) -> None:
        for item, forms in self._forms.items():
            of_all_hosts = {
                name: blocks for by_item in files for name, blocks in by_item[item].items()
            }
            self._write(f"{item}/{INDEX}", index_of(forms, of_all_hosts))
        for path, content in self._small.items():
            self._write(path, content)

        # the mark is the last file: with it the checkpoint counts
        final, mark = self._folder / str(self._step), self._own(self._step) / COMMITTED_FILE
        write_atomically(mark, b"")
        if is_remote(final):
            self.may_be_committed = True
            move_tree(mark, final / COMMITTED_FILE)
        else:
            if not is_own(final):
                raise ConfigError(
                    f"{final}: another program wrote it while this run trained, so nothing is "
                    "written over it; move it away, and the run goes on from its newest checkpoint"
                )
            remove_tree(final)
            self.may_be_committed = True
            move_tree(self._place, final)

        if self._best is not None:  # names a checkpoint that is there, before and after this write
            self._write_best(self._best)
        if self._on_commit:
            self._on_commit(self._step)
        for step in self._old:
            self._remove(step)

    def _write_best(self, best: BestCheckpoint) -> None:
        """Names the best checkpoint, unless another program wrote a `best` meanwhile."""
        self.is_best_foreign = bool(why := foreign_best(self._folder))
        if why:
            warn_once(
                f"{self._folder / BEST} is {why}, which another program wrote; it stays, and the "
                "best checkpoint is kept under its step, and named there once you have moved it "
                "away"
            )
        else:
            write_atomically(self._folder / BEST, best.to_bytes())

    def _write(self, path: str, content: bytes) -> None:
        file = self._place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint, which never counts with only some of its files."""
        folder, removed = self._folder / str(step), self._own(step)
        if is_remote(folder):
            (folder / COMMITTED_FILE).unlink(missing_ok=True)
            remove_tree(folder)
        elif folder.exists():
            move_tree(folder, removed)
            remove_tree(removed)
