"""The page of a replay: every sample with its documents, tokens coloured by their loss."""

from __future__ import annotations

from collections.abc import Iterator

from maxbatch.around.pages.page import Page, coloured, details, heading, paragraph, table
from maxbatch.around.replay.replayed import Replayed, ShownSample, ShownUpdate
from maxbatch.around.replay.task import Content

_FIGURES = ("loss", "grad_norm", "data_fingerprint")
_OPEN = 3  # samples of an update that are unfolded


def page_of(replayed: Replayed, name: str) -> Page:
    """Returns the page of a replay of the run of that name."""
    page = Page(f"maxbatch replay: {name}, update {replayed.update.figures.step}")
    page.add(paragraph(f"Taken again from {replayed.start}."))
    page.add(*map(paragraph, replayed.differences))
    most = max(_losses(replayed), default=0.0)
    for update in reversed(replayed.shown):
        page.add(*_parts(update, most))
    page.add(heading("To leave these rows out"), coloured([(_setting(replayed), None)], 0))
    return page


def _setting(replayed: Replayed) -> str:
    return f'skip_samples="{replayed.skip_samples}"'


def _losses(replayed: Replayed) -> Iterator[float]:
    for update in replayed.shown:
        for sample in update.samples:
            for _, pieces in sample.content.texts:
                yield from (loss for _, loss in pieces if loss is not None)


def _parts(update: ShownUpdate, most: float) -> Iterator[str]:
    figures = update.figures._asdict()
    yield heading(f"Update {update.figures.step}")
    rows = [(name, figures[name], figures[f"recorded_{name}"]) for name in _FIGURES]
    yield table(("", "again", "recorded"), rows)
    by_pull = sorted(update.samples, key=lambda shown: -shown.sample.pull)
    for place, sample in enumerate(by_pull):
        texts = _texts(sample.content, most)
        yield details(_summary(sample), *texts, is_open=place < _OPEN)


def _summary(shown: ShownSample) -> str:
    sample = shown.sample
    figures = {
        "loss": sample.loss,
        "weight": sample.weight,
        "gradient norm": sample.grad_norm,
        "share": sample.share,
    }
    words = (
        f"{name} {'–' if value is None else format(value, '.5g')}"
        for name, value in figures.items()
    )
    return f"Sample {sample.index}{shown.content.title}: {', '.join(words)}"


def _texts(content: Content, most: float) -> Iterator[str]:
    for title, pieces in content.texts:
        if title:
            yield paragraph(title)
        yield coloured(pieces, most)
