"""Compilation of one program: detects a lack of memory, and tries again with smaller fusions."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from maxbatch.run.compile.flags import VARIABLE, named_flags
from maxbatch.system.errors import one_line
from maxbatch.system.terminal.warning import warn_once

HBM = "hbm"
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED, _AVAILABLE = (rf"(?P<{name}>[\d.]+[KMGT]?)B?" for name in ("needed", "available"))
# Messages of the compilers for TPUs and GPUs; the first match counts.
_WANTED = (
    rf"Used {_NEEDED} of {_AVAILABLE} (?P<space>\w+)",
    rf"Scoped allocation with size {_NEEDED} and limit {_AVAILABLE} exceeded scoped (?P<space>\w+) limit",
    rf"\({_NEEDED}\) exceeds available (?P<space>HBM) \({_AVAILABLE}\)",
)

# Flags that enlarge fusions; those with the largest need of on-chip memory come first.
_FUSING = (
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
    "xla_tpu_enable_async_collective_fusion",
)


class Shortage(NamedTuple):
    """The memory that a program lacks, from the compiler's message."""

    space: str = HBM  # `hbm`, or memory of a core: `vmem`, `smem`
    needed: int | None = None  # bytes; None if not in the message
    available: int | None = None


LACKS_HBM = Shortage()


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a compiler's error means a lack of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def shortage_in(message: str) -> Shortage:
    """Parses the lack of memory from a compiler's message."""
    shortage = next(filter(None, (re.search(pattern, message) for pattern in _WANTED)), None)
    if shortage is None:
        named = re.search(r"in memory space (\w+)", message)
        return Shortage(named[1].lower() if named else HBM)
    return Shortage(
        shortage["space"].lower(), _num_bytes(shortage["needed"]), _num_bytes(shortage["available"])
    )


def _num_bytes(text: str) -> int:
    number = text.rstrip("KMGT")
    return round(float(number) * _UNITS[text[len(number) :]])


def compile_program(
    lowered: jax.stages.Lowered, options: Mapping[str, str] = NO_OPTIONS
) -> jax.stages.Compiled:
    """Compiles a program with compiler options; drops refused ones, with a warning.

    If a fusion exceeds a core's memory, compiles again without the flags that fuse.

    Args:
      options: values of flags, by their names without dashes (`program_options`).

    Raises:
      JaxRuntimeError: the compiler fails even without options.
    """
    left: dict[str, str | bool] = dict(options)
    while True:
        try:
            return lowered.compile(compiler_options=left or None)
        except jax.errors.JaxRuntimeError as error:
            if is_out_of_memory(error):
                _fuse_less(left, shortage_in(str(error)), error)
            else:
                _drop_refused(left, error)


def jit_with(options: Mapping[str, str]) -> Callable[..., Callable[..., Any]]:
    """Returns `jax.jit`, or, with options (`program_options`), a version that uses
    `compile_program`.
    """
    return functools.partial(_Jitted, options) if options else jax.jit


class _Jitted:
    """A jitted function of arrays, with one compiled program per kind of arguments."""

    def __init__(
        self, options: Mapping[str, str], function: Callable[..., Any], **how: Any
    ) -> None:
        self._options, self._jitted = options, jax.jit(function, **how)
        self._programs: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        kind = structure, *((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        if kind not in self._programs:
            self._programs[kind] = compile_program(self._jitted.lower(*arguments), self._options)
        return self._programs[kind](*arguments)


def _fuse_less(options: dict[str, str | bool], lacks: Shortage, error: Exception) -> None:
    """Turns off the next flag that fuses; raises the error if the program lacks HBM or no such flag
    is left.
    """
    held = {f"--{name}={value}" for name, value in options.items()} | set(
        os.environ.get(VARIABLE, "").split()
    )
    flag = next(
        (flag for flag in _FUSING if options.get(flag) != "false" and f"--{flag}=true" in held),
        None,
    )
    if lacks.space == HBM or flag is None:
        raise error
    options[flag] = "false"
    bytes_of = f"{lacks.needed} of {lacks.available} bytes of" if lacks.needed else "too much"
    warn_once(
        f"a fusion of this program needs {bytes_of} {lacks.space}; compiling it again with "
        f"--{flag}=false (stated in {VARIABLE} this takes no second compilation)"
    )


def _drop_refused(options: dict[str, str | bool], error: Exception) -> None:
    """Removes the options named in an error, or all if it names none; raises the error if none is
    left.
    """
    if not options:
        raise error
    refused = named_flags(str(error), options) or list(options)
    for name in refused:
        del options[name]
    reason = one_line(error, 200)
    warn_once(
        f"the compiler fails on a program with --{', --'.join(refused)} ({reason}); compiling it "
        "again without"
    )
