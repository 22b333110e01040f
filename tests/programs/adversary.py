"""An adversary: fuzzed command lines and damaged files; none may do harm.

`python -m tests.programs.adversary --seed 1 --lines 10000 --files 5000`
`python -m tests.programs.adversary --seed 1 --minutes 30`

Every case runs in a child of its own. It has to end within 10 s and 2 GB, without a traceback, with
an exit code of the contract, with one line on standard error if it exits 2, and with nothing
half-written. For each way to fail the program prints the smallest case found; its number makes it
again: `--seed 1 --only "line 17"`. Commands stop, with exit code 0, where they would train, start
processes or compile for minutes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# Before JAX is imported: one device, no network, and caches that the cases share.
os.environ.update(
    JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_backend_optimization_level=0", TERM="xterm-256color"
)
os.environ.pop("COLUMNS", None)

from tests.programs import adversary_pool as pool
from tests.programs.adversary_cases import Case
from tests.programs.adversary_files import KINDS, make_file_case
from tests.programs.adversary_lines import TINY, make_line

_MOST = 10_000_000  # cases of a run that only --minutes ends


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases and prints failures; returns 1 if there are any."""
    args = _parser().parse_args(argv)
    pool.LONGEST_S = args.longest
    root = Path(tempfile.mkdtemp(prefix="adversary-"))
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    try:
        return _prepare_and_run(args, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _prepare_and_run(args: argparse.Namespace, root: Path) -> int:
    kinds = [
        name
        for name, kind in KINDS.items()
        if name in (args.kinds or KINDS) and not (args.quick and kind.is_slow)
    ]
    base_of = functools.cache(functools.partial(_base, root))
    line = functools.partial(make_line, args.seed, _line_base(root))
    file = functools.partial(make_file_case, args.seed, kinds, base_of)
    if args.files != 0 and not args.only:
        for name in kinds:
            base_of(name)  # before the workers fork
    pool.load_everything()
    with pool.without_long_work():
        if args.only:
            kind, _, number = args.only.partition(" ")
            return _show({"line": line, "file": file}[kind](int(number)), root)
        return _run({"line": (line, args.lines), "file": (file, args.files)}, args, root)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="fuzzed command lines and damaged files")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        help="stop after so long (without --lines and --files: run so long)",
    )
    parser.add_argument("--lines", type=int, help="command lines")
    parser.add_argument("--files", type=int, help="damaged files")
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes a compilation to make or to read"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="the kinds of files (all)")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--longest", type=float, default=10.0, metavar="S", help="seconds of a case (10)"
    )
    parser.add_argument("--only", metavar="'line N'", help="run one case and print how it ends")
    return parser


def _base(root: Path, name: str) -> Path:
    folder = root / "bases" / name.replace(" ", "-")
    folder.mkdir(parents=True)
    # In a process of its own: threads that libraries start there would be missing in the forked
    # cases.
    maker = multiprocessing.get_context("fork").Process(target=KINDS[name].make, args=(folder,))
    maker.start()
    maker.join()
    assert maker.exitcode == 0, f"the files of {name} cannot be made"
    return folder


def _line_base(root: Path) -> Path:
    """Makes a folder with a file of each sort that a command line may name."""
    folder = root / "bases" / "lines"
    (folder / "folder").mkdir(parents=True)
    for name in ("import", "folders", "huggingface"):
        KINDS[name].make(folder)
    (folder / "run.yml").write_text("".join(f"{pair.replace('=', ': ', 1)}\n" for pair in TINY))
    (folder / "data.jsonl").write_text('{"text": "a b c"}\n{"tokens": [1, 2]}\n')
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "empty").touch()
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "dangling").symlink_to("gone")
    (folder / "loop").symlink_to("loop")
    (folder / "zero").symlink_to("/dev/zero")
    return folder


def _run(
    parts: dict[str, tuple[Callable[[int], Case], int | None]], args: argparse.Namespace, root: Path
) -> int:
    started = time.monotonic()
    runs_for_time = all(count is None for _, count in parts.values())
    assert not runs_for_time or args.minutes, "--minutes, --lines or --files must be given"
    status = 0
    for place, (name, (make, count)) in enumerate(parts.items(), 1):
        count = _MOST if runs_for_time else count or 0
        share = place / len(parts) if runs_for_time else 1.0
        until = started + share * 60 * args.minutes if args.minutes else float("inf")
        found = pool.run_all(make, range(count), root, args.workers, until)
        seconds = time.monotonic() - started
        print(
            f"seed {args.seed}: {found['ran']:,} {name}s, {seconds:,.0f} s, "
            f"{len(found['faults'])} kinds of failure; exit codes {found['codes']}, longest "
            f"{found['longest_s']:.1f} s, most {found['most_bytes'] >> 20:,} MB",
            flush=True,
        )
        for kind, (number, says) in found["faults"].items():
            case = pool.shrunk(make(number), pool.Fault(kind, says), root)
            print(
                f"\n{found['counts'][kind]} x {kind}\n  --seed {args.seed} --only '{name} "
                f"{number}'\n  {case}\n    " + says.strip().replace("\n", "\n    "),
                flush=True,
            )
        status |= bool(found["faults"])
    return int(status)


def _show(case: Case, root: Path) -> int:
    fault, ended = pool.run_case(case, root)
    print(
        case, f"exit {ended.code}, {ended.seconds:.1f} s, {ended.peak_bytes >> 20:,} MB", sep="\n"
    )
    print(ended.stdout[-2000:], ended.stderr[-4000:], fault or "nothing is wrong", sep="\n")
    return 1 if fault else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(main())
