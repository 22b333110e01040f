"""`maxbatch generate`: continues a prompt with the model of a run."""

from __future__ import annotations

import argparse
import math

from maxbatch.system.errors import ConfigError


def _check_ranges(max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens={max_new_tokens} must be at least 1; works: --max-new-tokens=1")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"--temperature={temperature} must be finite and >= 0; works: --temperature=0")
    if top_k < 0:
        raise ConfigError(f"--top-k={top_k} must be >= 0; works: --top-k=0 (no limit)")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p={top_p} must be in (0, 1]; works: --top-p=1 (no limit)")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"--seed={seed} must be in [0, 2^32); works: --seed={seed % 2**32}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `maxbatch generate` takes."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run folder, or one of its checkpoints")
    parser.add_argument("--prompt", default="", help="text to start from; none: the beginning of a document")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens to add, also beyond max_target_length: a full window goes on from its last half (128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0: the likeliest token; 1: as trained (0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: all (0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest that together have probability P (nucleus); 1: all (1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text (0)")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation by the newest checkpoint of a run.

    Raises:
      ConfigError: a flag is out of its range, or there is no such run or checkpoint.
    """
    from maxbatch.data.store.tokenizers import make_tokenizer
    from maxbatch.sampling.text import generate_text
    from maxbatch.training.compile.cache import use_persistent_cache
    from maxbatch.training.parameters import load_parameters

    _check_ranges(args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.seed)
    config, _, params = load_parameters(args.run_dir)
    use_persistent_cache(config)
    text = generate_text(
        params,
        make_tokenizer(config),
        args.prompt,
        config,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        nucleus_p=args.top_p,
        seed=args.seed,
    )
    print(text)
    return 0
