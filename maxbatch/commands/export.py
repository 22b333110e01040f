"""`maxbatch export`: writes a model as a Hugging Face folder, or as a checkpoint of MaxText."""

from __future__ import annotations

import argparse

from maxbatch.commands.arguments import add_averaged, check_overrides, model_of
from maxbatch.config.base_path import BASE_KEY, stated_base
from maxbatch.config.values import shown
from maxbatch.system.errors import EXIT_DONE, ConfigError
from maxbatch.system.terminal.folding import printable

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "a run folder, one of its checkpoints, a Hugging Face folder, or a MaxText checkpoint"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument(
        "--output", required=True, metavar="DIR", help="the folder to write, new or empty"
    )
    form = (
        "huggingface (default): as transformers and vLLM load it; maxtext: as MaxText does (extra "
        "maxtext)"
    )
    parser.add_argument(
        "--format", choices=("huggingface", "maxtext"), default="huggingface", help=form
    )
    dtype = "of the tensors (those of the checkpoint)"
    parser.add_argument("--dtype", choices=_DTYPES, help=dtype)
    moved = (
        "load_parameters_path=PATH: where the base model of a run's adapters is now, if it was "
        "moved"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=moved)
    add_averaged(parser)
    adapter = (
        "write the adapters of a run with lora_rank alone, as PEFT loads them (without it: merged "
        "into the model)"
    )
    parser.add_argument("--adapter", action="store_true", help=adapter)


def run(args: argparse.Namespace) -> int:
    """Writes the folder of a model, or of its adapters; returns the exit code."""
    check_overrides(args.overrides, "export takes one MODEL")
    base = stated_base(args.overrides)
    for text in args.overrides:
        if text.partition("=")[0].strip() != BASE_KEY:
            raise ConfigError(
                f"{shown(text)}: export takes no config key but {BASE_KEY}; works: {BASE_KEY}=PATH"
            )
    if args.format == "maxtext" and args.adapter:
        raise ConfigError("--adapter: MaxText's form has no adapters alone; works: no --adapter")
    model = model_of(args)
    if args.format == "maxtext":
        from maxbatch.around.maxtext.export import export_maxtext

        summary = export_maxtext(model, args.output, args.dtype, args.averaged, base)
    elif args.adapter:
        from maxbatch.around.huggingface.export.peft import export_adapters

        summary = export_adapters(model, args.output, args.dtype, args.averaged, base)
    else:
        from maxbatch.around.huggingface.export.model import export_model

        summary = export_model(model, args.output, args.dtype, args.averaged, base)
    print(printable(summary))
    return EXIT_DONE
