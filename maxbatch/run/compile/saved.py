"""Compiled programs on disk, without pickle: `maxbatch compile` writes them, `train` with
`compiled_dir` loads them.

A folder has `manifest.json` and one file per program, an executable in XLA's format. Argument
trees, shapes, shardings and donation come from lowering the program again, which takes seconds,
while compiling takes minutes. Reading a folder runs none of it, but training then runs the
programs, which are machine code: use only folders that you wrote or trust.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import Mesh

from maxbatch.config.values import shown
from maxbatch.data.feed.placement import BatchShape
from maxbatch.parallel.jax_internals import load_executable, load_on_device
from maxbatch.plan.rampup import Stage
from maxbatch.run.compile.target import device_facts, machine_name
from maxbatch.system.errors import ConfigError, one_line, reading, writing
from maxbatch.system.hardware.cpu_devices import cpu_features
from maxbatch.system.storage.atomic_files import write_atomically, writing_folder
from maxbatch.system.storage.bounded import RefusedContent, read_bytes, read_json
from maxbatch.system.storage.leases import leased
from maxbatch.system.storage.storage import AnyPath, as_path

T = TypeVar("T")
FORMAT = 3
MANIFEST = "manifest.json"
_MOST_BYTES = 4 << 30  # bound of one program


def versions(platform: str) -> dict[str, str]:
    """Returns the versions that determine programs: compilers and our source code."""
    packages = ["jax", "jaxlib", "flax", "optax"] + ["libtpu"] * (platform == "tpu")
    software = {name: importlib.metadata.version(name) for name in packages}
    if platform == "cpu":
        software["cpu"] = _hash(cpu_features().encode())
    return {**software, "source": _source_hash()}


@functools.cache
def _source_hash() -> str:
    """Returns a hash of the source modules that determine compiled programs."""
    package = Path(__file__).parents[2]
    rooms = ("families", "plan", "data/feed", "data/stream", "parallel", "model", "update", "run")
    modules = [path for room in rooms for path in (package / room).rglob("*.py")]
    return _hash(*(path.read_bytes() for path in sorted(modules)))


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[
        :16
    ]


def save_programs(
    folder: AnyPath,
    config_keys: Mapping[str, str],
    devices: Sequence[jax.Device],
    shapes: Sequence[BatchShape],
    programs: Mapping[str, jax.stages.Compiled],
    modelled_step_s: Sequence[float | None] = (),
) -> int:
    """Writes the programs of a run. The manifest comes last, so only a complete folder has one.

    `config_keys` are those of `program_keys`. Shapes are those of the steps, in the order of
    `plan_shapes`; the programs were compiled for the devices. `modelled_step_s` are the steps'
    seconds by the compiler's schedule, for `plan`; None where it has no clock.

    Returns:
      The bytes written.

    Raises:
      ConfigError: the folder cannot be written.
    """
    files: dict[str, bytes] = {}
    for name, compiled in programs.items():
        executable = compiled.runtime_executable()
        assert executable is not None, "a compiled program has an executable"
        files[name] = executable.serialize()
    manifest = {
        "format": FORMAT,
        **_identity(config_keys, devices),
        "shapes": shapes,
        "modelled_step_s": modelled_step_s,
        "programs": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    with (
        writing(f"--output {folder}"),
        leased(folder, "writes programs into it; wait for it"),
        writing_folder(folder, last=MANIFEST) as building,
    ):
        for name, content in files.items():
            write_atomically(building / f"{name}.bin", content)
        write_atomically(building / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    return sum(map(len, files.values()))


def _identity(
    config_keys: Mapping[str, str], devices: Sequence[jax.Device]
) -> dict[str, Mapping[str, object]]:
    """Returns the facts that determine a run's programs, by part."""
    return {
        "versions": versions(devices[0].platform),
        "devices": device_facts(devices),
        "config": config_keys,
    }


def _shape(numbers: Sequence[int]) -> BatchShape:
    """Parses a shape in a manifest; raises TypeError or RefusedContent."""
    shape = BatchShape(*numbers)
    if not all(type(size) is int and size > 0 for size in shape):
        raise RefusedContent(f"{MANIFEST}: shapes must be whole numbers above 0")
    return shape


class SavedPrograms:
    """The compiled programs in a folder, for a run with these `program_keys` on these devices.

    Attributes:
      shapes: the batch shapes of the steps, in the order of `plan_shapes`.

    Raises:
      ConfigError: the folder has no programs, or they are for another format, version, machine or
        config.
    """

    def __init__(self, folder: str, config_keys: Mapping[str, str], mesh: Mesh) -> None:
        self._folder, self._mesh = as_path(folder), mesh
        devices = list(mesh.devices.flat)
        here = _identity(config_keys, devices)
        self._folder = self._for_machine(devices)
        try:
            manifest = read_json(self._folder / MANIFEST, MANIFEST)
            stored_format = manifest["format"]
            if stored_format == FORMAT:
                self.shapes = [_shape(numbers) for numbers in manifest["shapes"]]
                self._sums: dict[str, str] = dict(manifest["programs"])
                there = {part: dict(manifest[part]) for part in here}
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = (
                error
                if isinstance(error, RefusedContent)
                else f"{MANIFEST}: {type(error).__name__}"
            )
            raise ConfigError(
                f"compiled_dir={folder}: holds no compiled programs ({why}); "
                f'works: compiled_dir="", or maxbatch compile --output {folder}'
            ) from error
        if stored_format != FORMAT:
            raise ConfigError(
                f"compiled_dir={folder}: holds programs in format {shown(str(stored_format))}, and "
                f"this version of maxbatch reads format {FORMAT}; compile again, or works: "
                'compiled_dir=""'
            )
        differing = [
            f"{shown(key)}: {shown(str(there[part].get(key)))} there, "
            f"{shown(str(here[part].get(key)))} here"
            for part in here
            for key in sorted(here[part].keys() | there[part].keys())
            if here[part].get(key) != there[part].get(key)
        ]
        if differing:
            more = f" and {len(differing) - 6} more" if len(differing) > 6 else ""
            raise ConfigError(
                f"compiled_dir={folder}: was compiled for another run ({'; '.join(differing[:6])}{more}); "
                f'compile again, or works: compiled_dir=""'
            )

    def _for_machine(self, devices: Sequence[jax.Device]) -> AnyPath:
        """Returns the folder of programs for this number of devices: from `compile --survive`, or
        the folder itself.
        """
        smaller = self._folder / machine_name(devices)
        if not (smaller / MANIFEST).is_file():
            return self._folder
        try:
            facts = read_json(self._folder / MANIFEST, MANIFEST)["devices"]
        except (OSError, ValueError, TypeError, KeyError):
            return self._folder  # refused later, by name
        return self._folder if facts == device_facts(devices) else smaller

    def shapes_for(self, stages: Sequence[Stage]) -> list[BatchShape]:
        """Returns the shapes of the steps of a run.

        Raises:
          ConfigError: a shape has more rows than any batch of the stages needs.
        """
        most = 2 * max(
            stage.global_batch_size + stage.micro_batch_size_to_train_on for stage in stages
        )
        if too_large := [
            shape for shape in self.shapes if shape.micro_batch * shape.max_micro_batches > most
        ]:
            rows = shown(str(too_large[0].micro_batch * too_large[0].max_micro_batches))
            raise ConfigError(
                f"compiled_dir={self._folder}: {MANIFEST} states a step of {rows} rows, and no "
                f"batch of this run needs more than {most}; compile again"
            )
        return self.shapes

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def load(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Loads a program onto the devices, without compiling; the program is lowered.

        Raises:
          ConfigError: the file is missing, damaged, or not an executable for these devices.
        """
        return self._loaded(name, lambda content: load_executable(content, lower(), self._mesh))

    def load_on(
        self, name: str, lower: Callable[[], jax.stages.Lowered], devices: Sequence[jax.Device]
    ) -> dict[jax.Device, jax.stages.Compiled]:
        """Loads a program for one device onto several, without compiling; the program is lowered.

        Raises:
          ConfigError: as `load`.
        """
        lowered = lower()
        return self._loaded(
            name, lambda content: {d: load_on_device(content, lowered, d) for d in devices}
        )

    def _loaded(self, name: str, load: Callable[[bytes], T]) -> T:
        path = self._folder / f"{name}.bin"
        try:
            with reading(path, "compile again"):
                content = read_bytes(path, str(path), _MOST_BYTES)
        except RefusedContent as error:
            raise ConfigError(f"{error}; compile again") from None
        if hashlib.sha256(content).hexdigest() != self._sums[name]:
            raise ConfigError(
                f"{path}: is damaged (its checksum is not the manifest's); compile again"
            )
        try:
            return load(content)
        except jax.errors.JaxRuntimeError as error:
            reason = shown(one_line(error))
            raise ConfigError(
                f"{path}: is not an executable for these devices ({reason}); compile again"
            ) from error
