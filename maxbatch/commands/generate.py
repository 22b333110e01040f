"""`maxbatch generate`: continues a prompt with the model of a run."""

from __future__ import annotations

import argparse
import sys

from maxbatch.commands.arguments import count, place, real, whole
from maxbatch.config.huggingface import end_tokens, is_huggingface_folder
from maxbatch.config.values import Bounds
from maxbatch.system.errors import EXIT_DONE
from maxbatch.system.folding import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `maxbatch generate`."""
    run_dir = "a run folder, one of its checkpoints, or a Hugging Face folder"
    parser.add_argument("run_dir", type=place, metavar="RUN_DIR", help=run_dir)
    parser.add_argument("--prompt", default="", help="text to continue; none: the beginning of a document")
    parser.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N",
        help="most tokens to add, also beyond max_target_length: a full window continues from its last half (128)",
    )  # fmt: skip
    temperature = "0: the likeliest token; 1: as trained (0.8)"
    parser.add_argument(
        "--temperature", type=real(Bounds(0), "from 0 on", 0), default=0.8, metavar="T", help=temperature
    )
    top_k = "draw from the K likeliest; 0: all (0)"
    parser.add_argument("--top-k", type=whole(0), default=0, metavar="K", help=top_k)
    parser.add_argument(
        "--top-p", type=real(Bounds(above=0, at_most=1), "above 0 and at most 1", 1), default=1.0, metavar="P",
        help="draw from the likeliest that together have probability P (nucleus); 1: all (1)",
    )  # fmt: skip
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="S", help="same seed, same text (0)")


def run(args: argparse.Namespace) -> int:
    """Prints the prompt and its continuation by the newest checkpoint of a run; returns the exit code."""
    from maxbatch.data.store.cache_folder import cache_folder
    from maxbatch.data.store.tokenizers import make_tokenizer
    from maxbatch.model.decoder_config import DecoderConfig
    from maxbatch.sampling.sampler import SamplingRules
    from maxbatch.sampling.text import TextConfig, generate_text
    from maxbatch.training.compile.cache import use_persistent_cache
    from maxbatch.training.weights.parameters import open_source, restored

    source = open_source(args.run_dir)
    config = source.config()
    use_persistent_cache(config.compilation_cache_dir, cache_folder(config.data_cache_dir, "xla"))
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    if is_huggingface_folder(args.run_dir):  # a prompt of an imported model begins as its tokenizer has it
        config = source.config([f"add_bos={tokenizer.begins_with_bos()}".lower()])
    _, params = restored(source, DecoderConfig.of(config))
    ends = end_tokens(config.load_parameters_path)  # of a run: those of the model that it started from
    rules = SamplingRules(args.temperature, args.top_k, args.top_p, args.seed, args.max_new_tokens, ends)
    text = generate_text(params, tokenizer, args.prompt, TextConfig.of(config), rules)
    print(printable(text) if sys.stdout.isatty() else text)
    return EXIT_DONE
