"""A sweep on a page: its metric against each swept key, a heat map of two keys, the table of its
trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.around.pages.page import Page, heading, paragraph, table
from maxbatch.around.pages.plots import Figure, heat_map, is_grid, metric_against_key
from maxbatch.system.terminal.folding import counted


def add_sweep(page: Page, sweep: Mapping[str, Any]) -> None:
    """Adds a sweep, as `SweepFolder.to_dict` returns it, to a page."""
    trials, metric, keys = sweep["trials"], sweep["metric"], list(sweep["parameters"])
    counts = Counter(trial["status"] for trial in trials)
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    page.add(
        heading(f"Sweep {sweep['sweep_dir']}"),
        paragraph(
            f"{counted(len(trials), 'trial')} ({statuses}); sampler {sweep['sampler']}; metric: "
            f"{sweep['metric_meaning']}, lower is better. Only trials that are done are drawn."
        ),
    )
    page.add(
        *(paragraph(f"{sentence[0].upper()}{sentence[1:]}.") for sentence in sweep["at_the_edge"])
    )
    if figures := _figures(trials, metric, keys, sweep["log_keys"]):
        page.figures(figures)
    # the best first
    is_ranked = [trial["status"] == "done" and trial["value"] is not None for trial in trials]
    compared = any(t["value_at_equal_tokens"] is not None for t in trials)
    rows = [
        [
            rank if ranked else None,
            t["number"],
            *(_text(t["overrides"].get(key)) for key in keys),
            t["value"],
            *([t["value_at_equal_tokens"]] if compared else []),
            t["steps"],
            t["tokens"],
            t["status"] + (f": {t['reason']}" if t["reason"] else ""),
        ]
        for rank, (t, ranked) in enumerate(zip(trials, is_ranked, strict=True), start=1)
    ]
    best = 0 if any(is_ranked) else None
    at_equal = ["at equal tokens"] * compared
    page.add(
        table(
            ["rank", "trial", *keys, metric, *at_equal, "steps", "tokens", "status"],
            rows,
            marked=best,
        )
    )


def _figures(
    trials: Sequence[Mapping[str, Any]], metric: str, keys: Sequence[str], log_keys: Sequence[str]
) -> list[Figure]:
    done = []
    for trial in trials:
        if (
            trial["status"] == "done"
            and trial["value"] is not None
            and set(trial["overrides"]) == set(keys)
        ):
            overrides = {key: _text(value) for key, value in trial["overrides"].items()}
            lines = [
                f"trial {trial['number']}",
                *(f"{key}={text}" for key, text in overrides.items()),
            ]
            done.append((overrides, trial["value"], "\n".join(lines)))
    figures = [metric_against_key(key, metric, done, key in log_keys) for key in keys if done]
    if (
        done
        and len(keys) == 2
        and is_grid((keys[0], keys[1]), done)
        and all(len({overrides[key] for overrides, _, _ in done}) <= 20 for key in keys)
    ):
        figures.append(heat_map((keys[0], keys[1]), metric, done))
    return figures


def _text(value: bool | int | float | str | None) -> str:
    """Returns the value of an override as a sweep file has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
