"""`transcripts.jsonl`: responses of evals and trained responses, as text."""

from __future__ import annotations

from maxbatch.kinds.prompt.collecting import CollectedBatch
from maxbatch.kinds.prompt.evaluation import Evaluation
from maxbatch.parallel.hosts import is_first
from maxbatch.run.folder.metrics_log import StepLog
from maxbatch.run.folder.run_folder import RunFolder
from maxbatch.run.task import ShowText


class Transcripts:
    """Lines of `transcripts.jsonl`; evals' lines are also texts in TensorBoard.

    An eval's line has `step` and `transcripts`, a batch's line `step` (of its first update) and
    `trained`. Drops lines of updates after `step`, which will be redone.

    Args:
      period: batches between lines of a batch; -1: no lines.
    """

    def __init__(self, folder: RunFolder, show: ShowText, step: int, period: int) -> None:
        self._log = StepLog(folder, "transcripts.jsonl", step) if is_first() else None
        self._show, self._period = show, period

    def write_eval(self, step: int, evaluation: Evaluation) -> None:
        """Adds the transcripts of an eval after `step` updates."""
        transcripts = [transcript._asdict() for transcript in evaluation.transcripts]
        if self._log:
            self._log.append({"step": step, "transcripts": transcripts})
        lines = [
            f"    {'right' if t.passes else 'wrong'} {'greedy ' if t.greedy else 'sampled'} "
            f"{t.prompt}{t.response}"
            for t in evaluation.transcripts
        ]
        self._show(step, "transcripts", "\n".join(lines))

    def write_batch(self, step: int, number: int, version: int, batch: CollectedBatch) -> None:
        """Adds the responses of a sampled batch, if its line is due.

        Args:
          step: the batch's first update, from 1.
          number: the batch's number, from 0.
          version: updates behind the sampling policy.
        """
        if self._log and self._period > 0 and number % self._period == 0:
            trained = [response._asdict() for response in batch.responses()]
            self._log.append({"step": step, "policy_version": version, "trained": trained})

    def close(self) -> None:
        if self._log:
            self._log.close()
