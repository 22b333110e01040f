"""Every test has eight CPU devices and its own caches; both must be set before JAX starts."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from maxbatch.system.hardware.cpu_devices import give_cpu_devices_threads
from tests.helpers.command import QUICK_TO_COMPILE
from tests.helpers.stores import SCHEMES, Store, serving

pytest_plugins = ["tests.helpers.works"]

# How long an example takes says nothing on a machine that others share; a failure shows at the
# change that caused it.
settings.register_profile(
    "maxbatch", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("maxbatch")

# Nothing of what the user's environment says to the code under test.
_FOREIGN = (
    "MAXBATCH_",
    "JAX_",
    "LIBTPU_",
    "TPU_",
    "AWS_",
    "STORAGE_EMULATOR_",
    "GCSFS_",
    "FSSPEC_",
)
for _key in [key for key in os.environ if key.startswith(_FOREIGN)]:
    del os.environ[_key]
os.environ["TERM"] = "xterm-256color"  # of a dumb one rich asks no width
for _key in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_key, None)
# A shell's background job ignores Ctrl-C, and so would every process that a test starts and
# interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("PYTHONUNBUFFERED", None)  # what must be printed at once is, also without it
# Of the workers and of the commands that tests start, the first compiles a module, and not each of
# them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# One folder for the whole session, shared by the workers of pytest-xdist and by the commands that
# tests start.
_SESSION = Path(
    os.environ.setdefault("TESTS_SESSION_DIR", tempfile.mkdtemp(prefix="maxbatch-tests-"))
)
os.environ["XDG_CACHE_HOME"] = str(_SESSION / "cache")
# no test asks the hub
os.environ["HF_HOME"], os.environ["HF_HUB_OFFLINE"] = str(_SESSION / "huggingface"), "1"
os.environ["JAX_PLATFORMS"] = "cpu"
# No dtypes and no ranks mix by accident.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# XLA takes devices that meet 40 s late, as on a busy machine, for a deadlock, and aborts.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} {_PATIENT} --xla_force_host_platform_device_count=8"
give_cpu_devices_threads()
gc.set_threshold(50_000, 20, 100)  # as the command line does, and for its reason


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Marks tests that need stores or are slow; files with many long tests run first, so workers
    finish together.
    """
    for item in items:
        if {"gs", "s3", "store"} & set(item.fixturenames) and not item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.stores)
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.slow)
        if any(item.get_closest_marker(group) for group in ("gpu", "pages", "tpu")):
            # presets and what is imported compute in bfloat16
            item.fixturenames.append("standard_promotion")
    long = Counter(
        item.path for item in items if any(map(item.get_closest_marker, ("runs", "slow")))
    )
    # A short run of a program takes minutes. Of the others, the files at the end of the tree
    # compile most.
    items.sort(
        key=lambda item: (item.path.parent.name == "programs", long[item.path], item.path),
        reverse=True,
    )


@pytest.fixture(autouse=True)
def run_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Relative paths of the code under test must not land in the checkout."""
    monkeypatch.chdir(tmp_path)
    yield


@pytest.fixture
def standard_promotion(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets dtypes mix, here and in child processes: JAX's own attention and lowering of bfloat16
    do.
    """
    import jax

    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def gs() -> Iterator[Store]:
    """Returns an emulated Cloud Storage, which clients of this process and its children reach."""
    with serving("gs") as store:
        yield store


@pytest.fixture(scope="session")
def s3() -> Iterator[Store]:
    """Returns an emulated S3, which clients of this process and its children reach."""
    with serving("s3") as store:
        yield store


@pytest.fixture(params=SCHEMES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Returns each emulated store in turn; nothing fails in it unless the test plans it."""
    found: Store = request.getfixturevalue(request.param)
    found.plan()
    yield found
    found.plan()
