"""`python -m benchmarks.same_run.scores`: each family's checkpoint of MaxText, scored by both, and
written back.

MaxText makes a small model of each family with random parameters and computes the loss of rows by
its own training program, at a rate of 1e-30. Then `maxbatch score` scores the same rows with a run from
that checkpoint, `maxbatch export --format maxtext` writes it, and MaxText computes the losses of
what was written. Everything is float32 on one CPU device. The figures are written to
`benchmarks/same_run/scores.json` and to a table of `docs/import.md`; the command fails if one is
beyond its bar.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measurement import BenchmarkError
from benchmarks.same_run import maxtext, ours
from benchmarks.same_run.cases import DEEPSEEK, EXPERTS, GEMMA3, SMALL, Rows, make_rows
from benchmarks.same_run.environments import python_of, versions
from benchmarks.same_run.results import PAGE, replaced

FILE = Path(__file__).with_name("scores.json")
BEGIN, END = (
    "<!-- table: python -m benchmarks.same_run.scores --table -->\n",
    "<!-- end of the scores -->\n",
)
BAR = 1e-5  # of a row's loss, relative
_NUM_ROWS, _LENGTH, _SEED = 4, 32, 0
_NORMALISED = ("use_qk_norm=true",)
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama2": (),
    "mistral": (),
    "mixtral": EXPERTS,
    "qwen2": ("attention_bias=true",),
    "qwen3": _NORMALISED,
    "qwen3_moe": (*_NORMALISED, *EXPERTS, "norm_topk_prob=true"),
    "gemma": ("model_name=gemma-2b",),
    "gemma2": ("model_name=gemma2-2b", "base_num_decoder_layers=1", "sliding_window_size=8"),
    "gemma3": GEMMA3,
    "olmo3": (
        *_NORMALISED,
        "model_name=olmo3-7b",
        "base_num_decoder_layers=4",
        "sliding_window_size=8",
    ),
    "gpt_oss": (
        *EXPERTS,
        "attention_bias=true",
        "attention_sink=true",
        "mlp_bias=true",
        "routed_bias=true",
        "mlp_activations=[sigmoid,linear]",
        "mlp_activations_limit=7.0",
        "inhomogeneous_layer_cycle_interval=2",
        "sliding_window_size=8",
    ),
    "deepseek": DEEPSEEK,
}
# of the families whose logits MaxText multiplies with an embedding that it rounds to bfloat16
WHOLE_EMBEDDING = ("gemma", "gemma2", "gemma3")


def main(argv: list[str] | None = None) -> int:
    """Scores the named families, or all; returns 1 if a figure is beyond its bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.same_run.scores")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--environments", type=Path, default=Path("environments"), metavar="DIR")
    parser.add_argument("--table", action="store_true", help="write the table of the page alone")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.families) - FAMILIES.keys():
        parser.error(f"no family is called {', '.join(sorted(unknown))}")
    jax.config.update("jax_platforms", "cpu")
    failed = []
    for family in [] if arguments.table else arguments.families or FAMILIES:
        python = python_of("maxtext", arguments.environments)
        with tempfile.TemporaryDirectory(prefix="maxbatch-scores-") as folder:
            try:
                losses = losses_of(family, python, Path(folder))
            except BenchmarkError as error:
                print(f"scores: {family}: {error}", file=sys.stderr)
                failed.append(family)
                continue
        found = _differences(losses)
        print(f"scores: {family}: {', '.join(f'{name} {at:.1e}' for name, at in found.items())}")
        failed += [family] if max(found.values()) > BAR else []
        _write(family, losses, versions("maxtext", python))
    write_table()
    if failed:
        print(f"scores: beyond {BAR:g}, or not compared: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def losses_of(family: str, python: Path, folder: Path) -> dict[str, list[float]]:
    """Returns the loss of each row: by MaxText, by maxbatch, and by MaxText of what maxbatch
    wrote.
    """
    stated = dict(word.split("=", 1) for word in FAMILIES[family])
    settings = {
        **maxtext.MACHINE,
        "steps": str(_NUM_ROWS),
        "max_target_length": str(_LENGTH),
        "model_name": "default",
        "decoder_block": family,
        **SMALL,
        "per_device_batch_size": "1",
        "learning_rate": "1e-30",
        **stated,
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    rows = make_rows("full", _NUM_ROWS, _LENGTH, _SEED)
    np.savez(folder / "rows.npz", **rows)
    is_whole = family in WHOLE_EMBEDDING
    theirs = maxtext.train(words, python, folder, has_whole_embedding=is_whole)
    maxtext.import_words(words, folder / "imported.yml")
    start = [
        f"load_parameters_path={folder}/start/0",
        f"max_target_length={_LENGTH + 1}",
        "steps=1",
    ]
    ours.train(folder / "imported.yml", folder / "ours", maxtext.as_ours(rows), start)
    scored = _scored(folder / "ours", folder / "rows.jsonl", rows)
    _maxbatch("export", folder / "ours", "--format", "maxtext", "--output", folder / "exported")
    words.append(f"load_parameters_path={folder}/exported/0/items")
    back = maxtext.train(words, python, folder, has_whole_embedding=is_whole, name="back")
    return {
        "maxtext": [update.loss for update in theirs],
        "maxbatch": scored,
        "exported": [update.loss for update in back],
    }


def _scored(model: Path, file: Path, rows: Rows) -> list[float]:
    file.write_text("".join(json.dumps({"tokens": row.tolist()}) + "\n" for row in rows["tokens"]))
    records = json.loads(_maxbatch("score", model, file, "--json"))["records"]
    return [record["loss"] for record in records]


def _maxbatch(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "maxbatch", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"maxbatch {arguments[0]} ended: {done.stderr.strip()}")
    return done.stdout


def _differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the largest difference of a row's loss from MaxText's, relative: of the scores, and
    of what was written.
    """
    expected = np.array(losses["maxtext"])
    return {
        name: float(np.max(np.abs(np.array(losses[name]) - expected) / expected))
        for name in ("maxbatch", "exported")
    }


def _write(family: str, losses: Mapping[str, Sequence[float]], packages: Mapping[str, str]) -> None:
    written = load()
    written[family] = {
        "date": date.today().isoformat(),
        "versions": dict(packages),
        "settings": list(FAMILIES[family]),
        "losses": {name: list(rows) for name, rows in losses.items()},
    }
    in_order = {name: written[name] for name in FAMILIES if name in written}
    FILE.write_text(json.dumps(in_order, indent=1) + "\n")


def load() -> dict[str, Any]:
    """Returns the results by family."""
    results: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return results


def figures() -> dict[str, dict[str, float]]:
    """Returns the largest differences by family."""
    return {family: _differences(result["losses"]) for family, result in load().items()}


def table() -> str:
    """Returns the table of all families, in Markdown."""
    lines = ["| family | `score` | after `export` |", "|---|---|---|"]
    lines += [
        f"| {family} | {found['maxbatch']:.0e} | {found['exported']:.0e} |"
        for family, found in figures().items()
    ]
    return "\n".join(lines) + "\n"


def write_table() -> None:
    """Writes the table into the page."""
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, table()))


if __name__ == "__main__":
    sys.exit(main())
