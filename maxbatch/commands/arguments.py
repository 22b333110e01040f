"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from maxbatch.config.own_parts import TRAINED, refuse_own_parts
from maxbatch.config.paths import local_fault, place_fault
from maxbatch.config.values import Bounds, Scalar, Value, shown
from maxbatch.system.errors import ConfigError
from maxbatch.system.hardware.cpu_devices import make_cpu_devices
from maxbatch.system.terminal.warning import warn

if TYPE_CHECKING:
    from maxbatch.config.config import Config
    from maxbatch.system.processes.ray_cluster import RayCluster

_MOST_DEVICES = 2048  # JAX fails to make about 4,000 CPU devices in one process


def add_config(parser: argparse.ArgumentParser, *others: str) -> None:
    """Adds the positional arguments of a config, and others that a command takes among them."""
    metavar = " | ".join((*others, "CONFIG.yml", "key=value"))
    parser.add_argument(
        "config", nargs="*", metavar=metavar, help="a config file, and overrides of its keys"
    )


def check_overrides(overrides: Sequence[str], takes: str) -> None:
    """Raises ConfigError for a text that is no key=value, in words about what a command takes
    beside them.
    """
    for text in overrides:
        if "=" not in text:
            raise ConfigError(f"{shown(text)}: an override is key=value; maxbatch {takes}")


def config_of(
    args: argparse.Namespace, default: str | None = None, needs: Collection[str] = TRAINED
) -> Config:
    """Returns the config of the positional arguments; warns of a ramp that nothing else mentions.

    Without a file it reads `default`, or base.yml alone.

    Args:
      needs: arguments of `maxbatch.train` whose parts the command would need: a config of a run
        with one is refused.

    Raises:
      ConfigError: two files, or a config that cannot be used.
    """
    from maxbatch.config.loading import config_from, displaced_ramp, resolve

    path, overrides = config_arguments(args)
    flags = vars(args)
    try:
        settings = resolve(path or default, overrides)
    except ConfigError as error:
        devices = flags.get("devices") or flags.get("simulate_devices")
        hosts = flags.get("hosts") or flags.get("simulate_hosts")
        raise on_machine(
            error, devices, hosts, flags.get("slices") or 1, has_flags="devices" in flags
        ) from None
    warning = displaced_ramp(settings)
    # simulated hosts read the config again, and the first one warns
    if warning and not flags.get("simulate_hosts"):
        warn(warning)
    config = config_from(settings)
    refuse_own_parts(config.own_parts, needs)
    return config


def on_machine(
    error: ConfigError, devices: int | None, hosts: int | None, slices: int = 1, *, has_flags: bool
) -> ConfigError:
    """Returns a config error for the machine of a command line, for which it answers unknown keys.

    `has_flags`: whether the command plans for the machine of --devices and --hosts.
    """
    from maxbatch.config.foreign_words import Machine
    from maxbatch.config.unknown import UnknownKeys

    def plans(values: Mapping[str, Value], num_devices: int, num_hosts: int) -> bool:
        from maxbatch.config.combined import PlanConfig
        from maxbatch.plan.batch import BatchPlan

        try:
            BatchPlan.from_config(PlanConfig.of(values), num_devices, num_hosts, num_slices=slices)
        except ConfigError:
            return False
        return True

    if not isinstance(error, UnknownKeys):
        return error
    return error.on(Machine(devices, hosts, plans if devices or has_flags else None, has_flags))


def config_arguments(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Returns the config file, at most one, and the overrides of the arguments."""
    from maxbatch.config.sections import KEYS

    files = [text for text in args.config if "=" not in text]
    overrides = [text for text in args.config if "=" in text]
    for text in files:
        if text in KEYS and not os.path.exists(text):
            raise ConfigError(
                f"{text}: an override is key=value; works: {text}={KEYS[text].default}"
            )
    if len(files) > 1:
        first, second = map(shown, files[:2])
        raise ConfigError(
            f"{second}: only one config file is read ({first}); an override is key=value"
        )
    return (files[0] if files else None), overrides


def read_by(read: Callable[[str], object], rule: str, works: object) -> Callable[[str], object]:
    """Returns the `type` of an argument that `read` reads; `rule` and `works` describe a valid
    text.
    """

    def parse(text: str) -> object:
        try:
            return read(text)
        except (ConfigError, ValueError):
            raise argparse.ArgumentTypeError(
                f"{shown(text)}: must be {rule}; works: {works}"
            ) from None

    return parse


def whole(least: int, most: int | None = None, works: int | None = None) -> Callable[[str], object]:
    """Returns the `type` of an argument that takes a whole number; `works` is the example in a
    refusal.
    """
    rule = (
        f"a whole number from {least} on"
        if most is None
        else f"a whole number from {least} to {most}"
    )
    return read_by(
        Scalar("", "int", Bounds(least, most)).read, rule, least if works is None else works
    )


count = whole(1)


def real(bounds: Bounds, rule: str, works: object) -> Callable[[str], object]:
    """Returns the `type` of an argument that takes a number; `rule` is the bounds in words."""
    return read_by(Scalar("", "real", bounds).read, f"a number {rule}", works)


def check_at_most(flag: str, number: int, most: int) -> None:
    """Raises ConfigError for a flag that states more than `most`."""
    if number > most:
        raise ConfigError(f"{flag} {number}: must be at most {most}; works: {flag} {most}")


def place(text: str) -> str:
    """Returns a path of this machine or of an object store; the `type` of an argument."""
    return _path(text, place_fault(text))


def local_path(text: str) -> str:
    """Returns a path of this machine; the `type` of an argument."""
    return _path(text, local_fault(text))


def _path(text: str, rule: str | None) -> str:
    if rule is not None:
        raise argparse.ArgumentTypeError(f"{shown(text)}: must be {rule}")
    return text


def add_svg(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that writes the plots of a command's page as SVG files."""
    parser.add_argument(
        "--svg",
        type=place,
        metavar="DIR",
        help="write each plot as one SVG file into DIR, for papers",
    )


def add_ray(parser: argparse.ArgumentParser, tasks: str) -> None:
    """Adds the flags that run the tasks of a command on a Ray cluster."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help=f"run {tasks} on a Ray cluster: local (started for this command), auto (a running "
        "one), HOST:PORT",
    )
    parser.add_argument(
        "--resources",
        type=read_by(
            _resources,
            "names and amounts of Ray's resources, whole or below 1",
            "TPU=4 or CPU=8,GPU=1",
        ),
        metavar="NAME=N,...",
        help="what each task takes of its node (default: CPU=1)",
    )


def _resources(text: str) -> dict[str, float]:
    resources: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        number = float(amount)
        if not re.fullmatch(r"[A-Za-z][\w:.-]*", name) or name in resources:
            raise ValueError
        if not 0 < number < math.inf or (number > 1 and number % 1):
            raise ValueError
        resources[name] = number
    return resources


def ray_cluster(
    args: argparse.Namespace, retries: int = -1
) -> contextlib.AbstractContextManager[RayCluster | None]:
    """Returns the cluster of the flags of `add_ray`, None without them, as a context manager.

    It runs a task again up to `retries` times (-1: always) after its node or its worker process was
    lost.

    Raises:
      ConfigError: `--resources` without `--ray`, or a cluster that cannot be used.
    """
    if args.ray is None:
        if args.resources:
            raise ConfigError(
                "--resources: is for tasks on a Ray cluster; works: --ray local, or without "
                "--resources"
            )
        return contextlib.nullcontext()
    from maxbatch.system.processes.ray_cluster import RayCluster

    return RayCluster(args.ray, args.resources or {}, retries)


def add_simulated_devices(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds the flag that makes CPU devices."""
    parser.add_argument("--simulate-devices", type=count, metavar="N", help=purpose)


def check_simulated_devices(num_devices: int) -> None:
    """Raises ConfigError for more CPU devices than JAX makes in one process."""
    check_at_most("--simulate-devices", num_devices, _MOST_DEVICES)


def simulate_devices(num_devices: int | None) -> None:
    """Makes JAX, which must not be loaded yet, see that many CPU devices and nothing else; None:
    changes nothing.
    """
    if num_devices is not None:
        check_simulated_devices(num_devices)
        make_cpu_devices(num_devices)


def add_model(parser: argparse.ArgumentParser, **files: str) -> None:
    """Adds a model, files by name with their help, overrides of the model's config, and the flag of
    averages.
    """
    model = "a run folder, one of its checkpoints, a Hugging Face folder, or a MaxText checkpoint"
    parser.add_argument("model", type=place, metavar="MODEL", help=model)
    for name, text in files.items():
        parser.add_argument(name, type=place, metavar=name.upper(), help=text)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keys of the model's config, such as dtype",
    )
    add_averaged(parser)


def add_averaged(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that use the average of a run's parameters, and its best checkpoint."""
    averaged = "use the average of the parameters that a run with parameter_average_half_life keeps"
    parser.add_argument("--averaged", action="store_true", help=averaged)
    best = "use the checkpoint with the lowest eval loss, checkpoints/best of a run folder"
    parser.add_argument("--best", action="store_true", help=best)


def model_of(args: argparse.Namespace) -> str:
    """Returns the path of the model that MODEL and --best name."""
    from maxbatch.system.storage.storage import as_path

    if not args.best:
        return str(args.model)
    if not (as_path(args.model) / "checkpoints").is_dir():
        raise ConfigError(
            f"--best: {shown(args.model)} is no run folder with checkpoints/; works: no --best"
        )
    return f"{args.model.rstrip('/')}/checkpoints/best"
