"""Stacks of a process that hangs: `faulthandler` writes them without the interpreter's help."""

from __future__ import annotations

import linecache
import re
import traceback

_THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+)[^\n]*\n((?:  [^\n]*\n)*)", re.M)
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
# Frames that call a test.
_BELOW = re.compile(r"[/\\]_pytest[/\\]|[/\\]maxbatch[/\\]testing[/\\]host(_session)?\.py$")
# Frames inside JAX, and of a waiting pod.
_HIDDEN = re.compile(
    r"[/\\]jax[/\\]_src[/\\]|[/\\]multiprocessing[/\\]connection\.py|[/\\]testing[/\\]pod\.py _"
)


def stack_of(dump: str, thread: int) -> str:
    """Returns the stack of a thread from a dump of `faulthandler`, in Python's usual form; "" if it
    is missing.

    Args:
      dump: the text of `faulthandler` for all threads.
      thread: `threading.Thread.ident`.
    """
    for ident, lines in _THREAD.findall(dump):
        if int(ident, 16) == thread:
            frames = [(file, int(line), name) for file, line, name in _FRAME.findall(lines)]
            below = next(
                (i for i, (file, _, _) in enumerate(frames) if i and _BELOW.search(file)),
                len(frames),
            )
            shown = [
                frame for frame in frames[:below] if not _HIDDEN.search(f"{frame[0]} {frame[2]}")
            ]
            summary = [
                traceback.FrameSummary(
                    file, line, name, lookup_line=False, line=linecache.getline(file, line).strip()
                )
                for file, line, name in reversed(shown)
            ]
            return "".join(traceback.format_list(summary))
    return ""
