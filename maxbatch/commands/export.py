"""`maxbatch export`: writes a model as a Hugging Face folder."""

from __future__ import annotations

import argparse

from maxbatch.system.errors import EXIT_DONE

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `maxbatch export`."""
    model = "a run folder, one of its checkpoints, or a Hugging Face folder"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write, new or empty")
    dtype = "of the tensors (those of the checkpoint)"
    parser.add_argument("--dtype", choices=_DTYPES, help=dtype)


def run(args: argparse.Namespace) -> int:
    """Writes `config.json`, `generation_config.json`, tensors and tokenizer files; returns the exit code."""
    from maxbatch.training.export import export_model

    print(export_model(args.model, args.output, args.dtype))
    return EXIT_DONE
