"""`maxbatch export`: writes a model as a Hugging Face folder."""

from __future__ import annotations

import argparse

from maxbatch.commands.arguments import add_averaged, model_of
from maxbatch.system.errors import EXIT_DONE
from maxbatch.system.folding import printable

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "a run folder, one of its checkpoints, or a Hugging Face folder"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to write, new or empty")
    dtype = "of the tensors (those of the checkpoint)"
    parser.add_argument("--dtype", choices=_DTYPES, help=dtype)
    add_averaged(parser)
    adapter = "write the adapters of a run with lora_rank alone, as PEFT loads them (without it: merged into the model)"
    parser.add_argument("--adapter", action="store_true", help=adapter)


def run(args: argparse.Namespace) -> int:
    """Writes the folder of a model, or of its adapters; returns the exit code."""
    from maxbatch.huggingface.export.model import export_model
    from maxbatch.huggingface.export.peft import export_adapters

    export = export_adapters if args.adapter else export_model
    print(printable(str(export(model_of(args), args.output, args.dtype, args.averaged))))
    return EXIT_DONE
