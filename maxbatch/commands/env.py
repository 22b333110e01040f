"""`maxbatch env`: the versions and settings of this machine, for a report. Starts no device."""

from __future__ import annotations

import argparse
import os
import platform

from maxbatch.system.errors import EXIT_DONE
from maxbatch.system.hardware.versions import computing_versions, installed
from maxbatch.system.terminal.folding import folded_rows, printable, terminal_width

_OTHERS = (
    "numpy",
    "grain",
    "ml-dtypes",
    "orbax-checkpoint",
    "tokenizers",
    "transformers",
    "torch",
    "pyarrow",
    "gcsfs",
    "s3fs",
    "optuna",
    "ray",
    "bokeh",
    "lm-eval",
)
# of variables of the environment
_SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NCCL_", "MAXBATCH_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Prints versions, the machine, and the variables of the environment that change what runs."""
    machine = {"system": platform.platform(), "cores": str(os.cpu_count() or 1)}
    versions = computing_versions() | installed(_OTHERS)
    variables = {
        name: text for name, text in sorted(os.environ.items()) if name.startswith(_SETTINGS)
    }
    rows = [
        (name, printable(text, keep="")) for name, text in (versions | machine | variables).items()
    ]
    print("\n".join(folded_rows(rows, terminal_width())))
    return EXIT_DONE
