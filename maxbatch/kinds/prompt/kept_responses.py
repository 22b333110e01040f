"""Responses that a run has kept in `transcripts.jsonl`, for updates that are taken again.

A kept batch is neither sampled nor scored: its tokens and rewards are those of its line, and their
log-probabilities are computed by the policy that sampled them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from maxbatch.kinds.prompt.collecting import Rollouts, Workshop
from maxbatch.kinds.prompt.prompts import Prompt
from maxbatch.parallel.trees import State
from maxbatch.run.folder.json_file import checked
from maxbatch.run.folder.metrics import Record, lines_between
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.run_folder import TRANSCRIPTS_FILE
from maxbatch.system.storage.storage import AnyPath

_RESPONSE = {"prompt_index": int, "tokens": [int], "reward": float, "rewards": {str: float}}


class _Batch(NamedTuple):
    """A batch of prompts as its run recorded it."""

    num_prompts: int  # that it read
    groups: Mapping[int, list[dict[str, Any]]]  # responses by their prompt's own number


class KeptResponses:
    """The batches of a run whose responses it has kept with their tokens
    (`maxbatch.kinds.prompt.collecting.KeptRollouts`).

    Args:
      lines: of its updates, by step.
      after, until: kept are the batches whose first update is one of `after` + 1 to `until`.

    Raises:
      ConfigError: the file cannot be read.
    """

    def __init__(
        self, run_dir: AnyPath, lines: Mapping[int, Record], after: int, until: int
    ) -> None:
        self._batches = dict(_batches(run_dir / TRANSCRIPTS_FILE, lines, after, until))

    def rollouts(self, first: int, workshop: Workshop, params: State) -> Rollouts | None:
        """Returns the responses of the batch from prompt `first` on; None if they are not kept.

        A prompt that was read and not trained on has responses without a token, all of one reward.
        """
        batch = self._batches.get(first)
        if batch is None:
            return None
        prompts = workshop.prompts.read(first, batch.num_prompts)
        group = workshop.batch.num_generations
        if batch.groups.keys() - {prompt.index for prompt in prompts} or any(
            len(responses) != group for responses in batch.groups.values()
        ):
            return None  # of other prompts or groups than the config's
        tokens_RxL, mask_RxL, lengths_R = _rows(
            prompts, batch, group, workshop.length, workshop.prompts.tokenizer.pad_id
        )
        logprobs_RxL = workshop.roller.logprobs(params, tokens_RxL, lengths_R)
        scores = [_scores(batch, prompt, number) for prompt in prompts for number in range(group)]
        names = next((list(by_name) for _, by_name in scores if by_name), [])
        never_R = np.zeros(len(scores), bool)
        return Rollouts(
            tokens_RxL,
            mask_RxL,
            np.where(mask_RxL, logprobs_RxL, np.float32(0)),
            lengths_R,
            np.array([reward for reward, _ in scores], np.float32),
            never_R,
            never_R,
            {
                name: np.array([by_name.get(name, 0.0) for _, by_name in scores], np.float32)
                for name in names
            },
        )


def _rows(
    prompts: list[Prompt], batch: _Batch, group: int, length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tokens of the pairs with padding, where their responses are, and the tokens of
    prompt and response, as the sampler does.
    """
    tokens_RxL = np.full((len(prompts) * group, length), pad_id, np.int32)
    mask_RxL = np.zeros(tokens_RxL.shape, bool)
    lengths_R = np.zeros(len(tokens_RxL), np.int32)
    for row in range(len(tokens_RxL)):
        prompt = prompts[row // group]
        begin = len(prompt.tokens)
        response: list[int] = []
        if prompt.index in batch.groups:
            response = batch.groups[prompt.index][row % group]["tokens"][: length - begin]
        lengths_R[row] = begin + len(response)
        tokens_RxL[row, : lengths_R[row]] = [*prompt.tokens, *response]
        mask_RxL[row, begin : lengths_R[row]] = True
    return tokens_RxL, mask_RxL, lengths_R


def _scores(batch: _Batch, prompt: Prompt, number: int) -> tuple[float, Mapping[str, float]]:
    """Returns the reward of a response, and that of each function."""
    if prompt.index not in batch.groups:
        return 0.0, {}
    response = batch.groups[prompt.index][number]
    return response["reward"], response["rewards"]


def _batches(
    path: AnyPath, lines: Mapping[int, Record], after: int, until: int
) -> Iterator[tuple[int, _Batch]]:
    """Yields the first prompt of each kept batch, and the batch."""
    for line in lines_between(path, after, until):
        step, trained = line[Metric.STEP], line.get("trained")
        try:
            responses: list[dict[str, Any]] = checked(trained, [_RESPONSE], "trained")
        except TypeError:
            continue  # of an eval; an older line, without tokens; or a damaged one
        if step > 1 and step - 1 not in lines:
            continue  # a hole in metrics.jsonl: its first prompt is not known
        first = lines[step - 1][Metric.SAMPLES_SEEN] if step > 1 else 0
        if end := _end_of(lines, step, first):
            groups = defaultdict[int, list[dict[str, Any]]](list)
            for response in responses:
                groups[response["prompt_index"]].append(response)
            yield first, _Batch(end - first, groups)


def _end_of(lines: Mapping[int, Record], step: int, first: int) -> int | None:
    """Returns the index after the last prompt of the batch whose first update is `step`; None if
    its last update is not recorded.
    """
    seen = (lines[later][Metric.SAMPLES_SEEN] for later in sorted(lines) if later >= step)
    return next((end for end in seen if end > first), None)
