"""`maxbatch generate`: continues a prompt with the model of a run, or talks with it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from maxbatch.around.huggingface.folder.config_json import is_huggingface_folder
from maxbatch.commands.arguments import add_model, check_overrides, count, model_of, real, whole
from maxbatch.config.base_path import stated_base
from maxbatch.config.model_forms import context_length, end_tokens
from maxbatch.config.rules import check_vocabulary
from maxbatch.config.values import Bounds, shown
from maxbatch.system.errors import EXIT_DONE, ConfigError, report
from maxbatch.system.terminal.folding import printable
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.around.sampling.chat import Chat
    from maxbatch.config.config import Config
    from maxbatch.data.tokenizers.tokenizer import Tokenizer

_TEXT_TOKENS = 128
_MOST_CONTEXT = 8192  # tokens of a conversation; a longer context would take gigabytes
_PLAIN_FORMATS = ("completion", "text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    prompt = (
        "text to continue, or with --chat a message; none: the beginning of a document, or a "
        "conversation"
    )
    parser.add_argument("--prompt", help=prompt)
    chat = (
        "ask by the chat template of the model's tokenizer; without --prompt: a conversation, "
        "from standard input"
    )
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument(
        "--system", metavar="TEXT", help="with --chat: the message of the system before all others"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=count,
        metavar="N",
        help="most tokens to add (128), also beyond max_target_length: a full window continues "
        "from its last half; with --chat: most tokens of an answer (512)",
    )
    temperature = "0: the likeliest token; 1: as trained (0.8)"
    parser.add_argument(
        "--temperature",
        type=real(Bounds(0), "from 0 on", 0),
        default=0.8,
        metavar="T",
        help=temperature,
    )
    top_k = "draw from the K likeliest; 0: all (0)"
    parser.add_argument("--top-k", type=whole(0), default=0, metavar="K", help=top_k)
    parser.add_argument(
        "--top-p",
        type=real(Bounds(above=0, at_most=1), "above 0 and at most 1", 1),
        default=1.0,
        metavar="P",
        help="draw from the likeliest that together have probability P (nucleus); 1: all (1)",
    )
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=0, metavar="S", help="same seed, same text (0)"
    )


def run(args: argparse.Namespace) -> int:
    """Prints a prompt and its continuation by a run's newest checkpoint, or answers; returns 0."""
    if args.system is not None and not args.chat:
        raise ConfigError(
            f"--system {shown(args.system)}: belongs to --chat; works: --chat --system ..."
        )
    check_overrides(args.overrides, "generate takes one MODEL")
    if args.chat and args.prompt is not None and not args.prompt.strip():
        raise ConfigError(
            "--prompt: must not be empty beside --chat; works: a message, or no --prompt"
        )
    from maxbatch.around.sampling.chat import Chat
    from maxbatch.around.sampling.sampler import SamplingRules
    from maxbatch.around.sampling.text import generate_text
    from maxbatch.data.store.cache_folder import cache_folder
    from maxbatch.data.tokenizers.tokenizers import tokenizer_of
    from maxbatch.run.compile.cache import use_persistent_cache
    from maxbatch.run.weights.parameters import open_source, restored

    args.model = model_of(args)
    source = open_source(args.model, args.averaged, stated_base(args.overrides))
    config = source.config(args.overrides)
    use_persistent_cache(config.compilation_cache_dir, cache_folder(config.data_cache_dir, "xla"))
    tokenizer = tokenizer_of(config.stream)
    if args.chat:
        tokenizer.chat_template()  # refuses a tokenizer without one before the parameters are read
    # a prompt of an imported model begins as its tokenizer states
    if is_huggingface_folder(args.model):
        config = source.config([f"add_bos={tokenizer.begins_with_bos()}".lower(), *args.overrides])
    else:
        check_vocabulary(config, tokenizer.vocab_size)
    model = config.decoder
    _, params = restored(source, model)
    # of a run: the end tokens of the model that it started from
    ends = end_tokens(config.load_parameters_path)
    if args.chat:
        rules = SamplingRules(
            args.temperature, args.top_k, args.top_p, args.seed, args.max_new_tokens, ends
        )
        return _talk(
            Chat(params, tokenizer, model, rules, _context(config), args.system or ""), args
        )
    most = args.max_new_tokens or _TEXT_TOKENS
    rules = SamplingRules(args.temperature, args.top_k, args.top_p, args.seed, most, ends)
    prompt = args.prompt or ""
    text = generate_text(params, tokenizer, prompt, config.text, rules)
    print(_shown(text), flush=True)
    if text == tokenizer.decode(tokenizer.encode(prompt)):
        note("note: the text is empty: the first token drawn ends it")
    if _is_chat_model(config, tokenizer, args.model):
        note("note: this model's tokenizer has a chat template; --chat asks the model by it")
    return EXIT_DONE


def _is_chat_model(config: Config, tokenizer: Tokenizer, path: str) -> bool:
    """Returns whether a model's config states that it was trained on conversations."""
    from maxbatch.data.tokenizers.chat_prompts import chat_prompts

    if not config.recipe.holds_chats and not is_huggingface_folder(path):
        return False
    return config.sft_format not in _PLAIN_FORMATS and chat_prompts(tokenizer) is not None


def _context(config: Config) -> int:
    """Returns the most tokens of a conversation: a training row's, or more if the model's folder
    states more.
    """
    return min(
        context_length(config.decoder, config.load_parameters_path),
        max(config.max_target_length, _MOST_CONTEXT),
    )


def _talk(chat: Chat, args: argparse.Namespace) -> int:
    """Prints the answer to the prompt, or to each line of standard input."""
    on_terminal = args.prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if on_terminal:
        print(f"A conversation with {_shown(args.model)}; Ctrl-D ends it.")
    forgotten, is_asked = 0, False
    for message in _lines() if args.prompt is None else [args.prompt]:
        is_asked = True
        try:
            print_answer(chat, message)
        except ConfigError as error:
            if not on_terminal:
                raise
            report(error)
        if chat.forgotten > forgotten:
            forgotten = chat.forgotten
            note(
                "note: the conversation no longer fits into the model's context: it sees all but "
                f"the first {forgotten} messages"
            )
    if not is_asked and not on_terminal:
        raise ConfigError(
            "--chat: has no message; works: --prompt TEXT, a terminal, or lines on standard input"
        )
    return EXIT_DONE


def print_answer(chat: Chat, message: str) -> None:
    """Prints the answer to a message as it is sampled, and notes on standard error if it is empty
    or cut off.
    """
    answer = ""
    for piece in chat.say(message):
        print(_shown(piece), end="", flush=True)
        answer += piece
    print(flush=True)
    if chat.ended and not answer.strip():
        note("note: the answer is empty: the model ended its turn at once")
    if not chat.ended:
        note("note: the answer is cut off; --max-new-tokens and the model's context bound it")


def _lines() -> Iterator[str]:
    """Yields the lines of standard input that are not blank; on a terminal with a prompt and line
    editing.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # Pythons without it have a plain input()
            importlib.import_module("readline")
    while True:
        try:
            line = input("> " if is_terminal else "")
        except (EOFError, RuntimeError):  # RuntimeError: standard input is closed
            break
        if line.strip():
            yield line
    if is_terminal:
        print()


def _shown(text: str) -> str:
    return printable(text) if sys.stdout.isatty() else text
