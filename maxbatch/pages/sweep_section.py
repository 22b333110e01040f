"""A sweep on a page: its metric against each swept key, a heat map of two, the table of its trials."""

from __future__ import annotations

from collections.abc import Sequence

from maxbatch.pages.page import Page
from maxbatch.pages.plots import Figure, heat_map, metric_against_key
from maxbatch.runs.sweep_folder import METRICS, Result, SweepFolder


def add_sweep(page: Page, folder: SweepFolder) -> list[Result]:
    """Add a sweep to a page and return its results, the best first."""
    settings = folder.read()
    metric = settings["metric"]
    results = folder.results(metric)
    page.heading(f"Sweep {folder.path}")
    counts = {
        status: sum(r.status == status for r in results)
        for status in dict.fromkeys(r.status for r in results)
    }
    page.paragraph(
        f"{len(results)} trials ({', '.join(f'{count} {status}' for status, count in counts.items())}); sampler "
        f"{settings['sampler']}; metric: {METRICS[metric]}, lower is better. Only trials that are done are drawn."
    )
    figures = sweep_figures(results, metric, settings["log_keys"])
    if figures:
        page.figures(figures)
    keys = list(settings["parameters"])
    page.table(
        ["trial", *keys, metric, "steps", "status"],
        [
            [
                r.trial.number,
                *(r.trial.overrides[key] for key in keys),
                r.value,
                r.steps,
                r.status + (f": {r.reason}" if r.reason else ""),
            ]
            for r in results
        ],
    )
    return results


def sweep_figures(results: Sequence[Result], metric: str, log_keys: Sequence[str]) -> list[Figure]:
    """Return the figures of the trials that are done: none where there is none."""
    done = [
        (r.trial.overrides, r.value, f"trial {r.trial.number}<br>{r.trial.title.replace(' ', '<br>')}")
        for r in results
        if r.status == "done" and r.value is not None
    ]
    if not done:
        return []
    keys = list(done[0][0])
    figures = [metric_against_key(key, metric, done, key in log_keys) for key in keys]
    if len(keys) == 2 and all(len({overrides[key] for overrides, _, _ in done}) <= 20 for key in keys):
        figures.append(heat_map((keys[0], keys[1]), metric, done))
    return figures
