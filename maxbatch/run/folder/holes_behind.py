"""The check that a resume leaves out behind its position what the run has left out."""

from __future__ import annotations

from maxbatch.config.pins import read_written
from maxbatch.plan.holes import SKIP_SAMPLES, Holes
from maxbatch.plan.refusal import MOST_TYPED, Refusal
from maxbatch.plan.skip_samples import holes_of
from maxbatch.run.folder.position import CheckpointRecord
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath


def refuse_other_holes(
    run_dir: AnyPath, record: CheckpointRecord, which: str, holes: Holes
) -> None:
    """Raises ConfigError if holes behind the position of a checkpoint are not those of its run;
    `which` names the checkpoint.
    """
    seen = record.position.samples_seen
    recorded = str(record.identity["data"].get(SKIP_SAMPLES, ""))
    if _behind(holes, seen).digest == recorded:
        return
    text_before, before = _holes_before(run_dir, seen, recorded)
    position = seen if before is None else before.position_after(seen)
    where = f"{which}, after {seen} samples" + (f" (stream position {position})" if before else "")
    rule = f"must leave out what the run has left out before {where}"
    text = ""
    if before is not None:
        text = _behind(before, seen).merged_with(holes.ahead_of(position)).text
        if len(text) > MOST_TYPED:
            text = text_before
    if before is None or len(text) > MOST_TYPED:
        rule += "; give its ranges again, or another run_dir"
        raise Refusal({SKIP_SAMPLES: _shown(holes)}, SKIP_SAMPLES, rule, {})
    raise Refusal({SKIP_SAMPLES: _shown(holes)}, SKIP_SAMPLES, rule, {SKIP_SAMPLES: text})


def _behind(holes: Holes, samples_seen: int) -> Holes:
    return holes.before(holes.position_after(samples_seen))


def _shown(holes: Holes) -> str:
    return holes.text if len(holes) <= 8 else f"{len(holes)} ranges"


def _holes_before(run_dir: AnyPath, samples_seen: int, recorded: str) -> tuple[str, Holes | None]:
    """Returns `skip_samples` of the last session, and its holes; None if they are no longer
    known.
    """
    config = read_written(run_dir / "config.yml")
    if config is None:
        return "", None
    try:
        holes = holes_of(config.stream, is_kept=False)
    except ConfigError:  # its file is gone
        return "", None
    is_of_checkpoint = _behind(holes, samples_seen).digest == recorded
    return config.skip_samples, holes if is_of_checkpoint else None
