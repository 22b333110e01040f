"""`python -m benchmarks.audits [NAME ...]`: audits other trainers, each in an environment with its
newest versions.

For each trainer it makes a virtual environment, installs the packages with pip, runs the adapter in
`examples/audits/`, and writes `benchmarks/audit_results/NAME.json`. Then it writes the table of
`docs/audits.md` from all of these files. `--table` only writes the table. The packages are
installed for the interpreter that runs the command.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "audit_results"
PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = "<!-- table: python -m benchmarks.audits --table -->\n", "<!-- end of the table -->\n"


class Peer(NamedTuple):
    """Another project's trainer."""

    title: str
    adapter: str  # FILE:FUNCTION in examples/audits
    packages: tuple[str, ...]  # to install, by name; the table shows the version of the first
    threads: tuple[str, ...] = ()  # where its users reported this


PEERS = {
    "multisteps_nnx": Peer(
        "`optax.MultiSteps` in `nnx.Optimizer`", "multisteps_nnx.py:make", ("optax", "flax")
    ),
    "transformers": Peer(
        "transformers, `Trainer`",
        "transformers_trainer.py:make",
        ("transformers", "torch", "accelerate"),
    ),
    "transformers_no_count": Peer(
        "transformers, `Trainer`; the model's loss takes no `num_items_in_batch`",
        "transformers_trainer.py:make_without_a_count",
        ("transformers", "torch", "accelerate"),
    ),
    "trl_sft": Peer(
        "TRL, `SFTTrainer`", "trl_sft.py:make", ("trl", "torch"), ("huggingface/trl#2604",)
    ),
    "trl_dpo": Peer("TRL, `DPOTrainer`", "trl_dpo.py:make", ("trl", "torch")),
    "levanter": Peer(
        "Levanter, `Trainer`",
        "levanter_trainer.py:make",
        ("marin-levanter",),
        ("marin-community/levanter#842",),
    ),
    "tunix": Peer(
        "Tunix, `PeftTrainer`", "tunix_peft.py:make", ("google-tunix",), ("google/tunix#1744",)
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Audits the named peers; returns 1 if one cannot be audited."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.audits", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of: {', '.join(PEERS)} (default: all)"
    )
    parser.add_argument(
        "--environments", type=Path, default=Path("environments"), help="folder of the environments"
    )
    parser.add_argument("--table", action="store_true", help="write the table of the page alone")
    # this process has the packages of NAME
    parser.add_argument("--inside", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - PEERS.keys():
        parser.error(
            f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}"
        )
    if arguments.inside:
        return _audit(arguments.inside)
    failed = []
    for name in [] if arguments.table else arguments.names or PEERS:
        python = _environment(arguments.environments, PEERS[name].packages)
        command = [python, "-m", "benchmarks.audits", "--inside", name]
        variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        if subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode:
            failed.append(name)
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table() + text[text.index(END) :])
    print(f"written to {PAGE}" + (f"; not audited: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """Returns the Python of an environment with the packages; makes the environment if it is
    missing.
    """
    place = (folder / "-".join(sorted(packages))).absolute()
    python = place / "bin" / "python"
    if not (place / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy", *packages], check=True)
        (place / "made").touch()
    return python


def _audit(name: str) -> int:
    """Audits a peer in this process, and writes its result."""
    import maxbatch

    peer = PEERS[name]
    file, function = peer.adapter.split(":")
    # so that a new process finds `make` by its name
    sys.path.insert(0, str(ROOT / "examples" / "audits"))
    os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], str(ROOT)])
    make = getattr(importlib.import_module(Path(file).stem), function)
    began = time.perf_counter()
    found = maxbatch.audit(make, updates=2)
    result = {
        "date": date.today().isoformat(),
        "python": sys.version.split()[0],
        "versions": {package: version(package) for package in peer.packages},
        "seconds": round(time.perf_counter() - began),
        "audit": found.to_json(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}: {found}")
    return 0


def table() -> str:
    """Returns the table of all results, in Markdown."""
    lines = [
        "| framework | version | promise | verdict | parameters | loss | smallest case | thread | "
        "run on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, peer in PEERS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            lines += _rows(peer, json.loads(path.read_text()))
    return "\n".join(lines) + "\n"


def _rows(peer: Peer, result: dict[str, Any]) -> list[str]:
    """Returns a row for each broken promise, and one for all the others."""
    package = peer.packages[0]
    framework = f"{peer.title} | {package} {result['versions'][package]}"
    threads = ", ".join(
        f"[{each}](https://github.com/{each.replace('#', '/issues/')})" for each in peer.threads
    )
    promises, rows = result["audit"]["promises"], []
    for each in promises:
        if each["status"] == "broken":
            sizes = " | ".join(map(_percent, (each["by"], each["loss_by"])))
            verdict = each["cause"] or each["explanation"]
            cells = f"`{each['promise']}` | {verdict} | {sizes} | {_case(each['case'])} | {threads}"
            rows.append(f"| {framework} | {cells} | {result['date']} |")
    holding = ", ".join(f"`{each['promise']}`" for each in promises if each["status"] == "holds")
    return [*rows, f"| {framework} | {holding} | holds | | | | | {result['date']} |"]


def _percent(share: float | None) -> str:
    return "" if not share else f"{100 * share:,.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def _case(case: dict[str, Any]) -> str:
    layout, tokens = case["layout"], " + ".join(map(str, case["trained_tokens"]))
    padding = f" ({case['padding_rows']} of padding)" if case["padding_rows"] else ""
    passes, devices = layout["gradient_accumulation_steps"], layout["num_devices"]
    on = f" on {devices} devices" if devices > 1 else ""
    return f"{case['rows']} rows{padding}, passes: {passes}{on}; tokens {tokens}"


if __name__ == "__main__":
    sys.exit(main())
