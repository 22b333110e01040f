"""Compiled programs on disk: `maxbatch compile` writes them, `train` with `compiled_dir` loads them.

A folder holds `manifest.json` and one file per program, an executable in XLA's own format. Reading a folder runs
nothing of it. The programs are machine code, which training then runs: use only folders that you wrote, or trust.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import maxbatch
from maxbatch.config.keys import Fixes, names_fixing
from maxbatch.config.loading import keys
from maxbatch.config.values import shown
from maxbatch.data.feed.placement import BatchShape
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError
from maxbatch.training.compile.executable import executable_bytes, load_executable
from maxbatch.training.compile.target import device_facts

FORMAT = 2
MANIFEST = "manifest.json"


def program_keys(config: ConfigDict) -> dict[str, str]:
    """Returns the config keys that shape the programs of a run, as texts."""
    return {name: keys()[name].write(config[name]) for name in names_fixing(Fixes.PROGRAM)}


def versions(platform: str) -> dict[str, str]:
    """Returns the versions that shape them: of the compilers, and of the code that is compiled."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    if platform == "tpu":
        found["libtpu"] = importlib.metadata.version("libtpu")
    if platform == "cpu":
        found["cpu"] = _cpu_features()
    return {**found, "maxbatch": maxbatch.__version__, "source": _source_hash()}


@functools.cache
def _source_hash() -> str:
    """Returns a hash of the modules that compiled programs are made from."""
    package = Path(maxbatch.__file__).parent
    rooms = ("model", "parallel", "plan", "data/feed", "data/stream", "training")
    modules = [path for room in rooms for path in (package / room).rglob("*.py")]
    return _hash(*(path.read_bytes() for path in sorted(modules)))


@functools.cache
def _cpu_features() -> str:
    """Returns a hash of this CPU's features: a program for another CPU may use instructions that this one lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return _hash(*sorted({line.encode() for line in lines if line.startswith(("flags", "Features"))}))


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def save_programs(
    folder: Path,
    config: ConfigDict,
    devices: Mapping[str, object],
    shapes: Sequence[BatchShape],
    programs: Mapping[str, jax.stages.Compiled],
) -> int:
    """Writes the programs of a run. The manifest comes last, so only a complete folder has one.

    Args:
      folder: where to write.
      config: the run's config.
      devices: facts of the devices (`device_facts`).
      shapes: the batch shapes of the steps, in the order of `plan_shapes`.
      programs: the compiled programs by name.

    Returns:
      The bytes written.

    Raises:
      ConfigError: the folder cannot be written.
    """
    files = {name: executable_bytes(compiled) for name, compiled in programs.items()}
    manifest = {
        "format": FORMAT,
        "versions": versions(str(devices["platform"])),
        "devices": devices,
        "config": program_keys(config),
        "shapes": shapes,
        "programs": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
        for name, content in files.items():
            (folder / f"{name}.bin").write_bytes(content)
        write_atomically(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written ({error.strerror})") from error
    return sum(map(len, files.values()))


class SavedPrograms:
    """The compiled programs in a folder, for this run on these devices.

    Attributes:
      shapes: the batch shapes of the steps, in the order of `plan_shapes`.

    Raises:
      ConfigError: the folder holds none, or they are of another format, version, machine or config.
    """

    def __init__(self, folder: str, config: ConfigDict, mesh: Mesh) -> None:
        self._folder, self._mesh = Path(folder).expanduser(), mesh
        try:
            manifest = json.loads((self._folder / MANIFEST).read_text())
            found = manifest["format"]
            if found == FORMAT:
                self.shapes = [BatchShape(*map(int, shape)) for shape in manifest["shapes"]]
                self._sums: dict[str, str] = dict(manifest["programs"])
                there = {part: dict(manifest[part]) for part in ("versions", "devices", "config")}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"compiled_dir={folder}: holds no compiled programs ({MANIFEST}: {type(error).__name__}); "
                f'works: compiled_dir="", or maxbatch compile --output {folder}'
            ) from error
        if found != FORMAT:
            raise ConfigError(
                f"compiled_dir={folder}: holds programs in format {shown(str(found))}, and this version of maxbatch "
                f'reads format {FORMAT}; compile again, or works: compiled_dir=""'
            )
        devices = tuple(mesh.devices.flat)
        here: dict[str, Mapping[str, object]] = {
            "versions": versions(devices[0].platform),
            "devices": device_facts(devices),
            "config": program_keys(config),
        }
        differing = [
            f"{key}: {shown(str(there[part].get(key)))} there, {here[part].get(key)} here"
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

    def __contains__(self, name: str) -> bool:
        return name in self._sums

    def load(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Returns the program of that name on the devices; nothing is compiled.

        Args:
          name: of the program.
          lower: lowers the program; the file holds the executable alone.

        Raises:
          ConfigError: its file is missing, damaged, or not an executable for these devices.
        """
        path = self._folder / f"{name}.bin"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); compile again") from error
        if hashlib.sha256(content).hexdigest() != self._sums[name]:
            raise ConfigError(f"{path}: is damaged (its checksum is not the manifest's); compile again")
        try:
            return load_executable(content, lower(), self._mesh)
        except jax.errors.JaxRuntimeError as error:
            reason = shown(" ".join(str(error).split()))
            raise ConfigError(
                f"{path}: is no executable for these devices ({reason}); compile again"
            ) from error
