"""`maxbatch import` in tests: a file's text in, what became of its words and the config out."""

from __future__ import annotations

from pathlib import Path

from maxbatch import load_config
from maxbatch.around.importers.translation import Fate
from maxbatch.commands.import_config import translated, written
from maxbatch.config.config import Config


def imported(name: str, path: Path, text: str) -> tuple[Config, dict[str, Fate]]:
    """Returns the config of an imported file, and the fate of each word."""
    path.write_text(text)
    translation, _ = translated(name, path)
    run = path.with_name("imported.yml")
    run.write_text(written(translation, path.name))
    return load_config(run), {fate.word: fate for fate in translation.fates}
