"""The chips that are known without being here: memory, and the public figures that a step is ranked by."""

from __future__ import annotations

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device: a TPU chip, or a core of one where a chip shows as two devices; a GPU.

    Attributes:
      prefix: what `device_kind` begins with.
      hbm_bytes: what the TPU compiler allows a program; None: the device says it (`memory_stats`).
      tflops: dense bfloat16 peak, 10^12 per second.
      hbm_gb_s: memory bandwidth, 10^9 bytes per second.
      ici_gb_s: bandwidth to other devices of its slice or node, one way, all links together, 10^9 bytes per second.
      dcn_gb_s: bandwidth to other slices or nodes, one way, 10^9 bytes per second; of GPUs one port.
    """

    prefix: str
    hbm_bytes: int | None
    tflops: float
    hbm_gb_s: float
    ici_gb_s: float
    dcn_gb_s: float


# TPUs by the name that a topology begins with. Memory: what the compiler of libtpu 0.0.42 says that it has, when asked
# for more. Rates: the table of https://docs.cloud.google.com/tpu/docs/tpu7x, which compares v5p, v6e and tpu7x, and the
# pages of v4 and v5e beside it; ICI is given there for both directions and halved here. v4 and tpu7x show a chip as
# two devices, with half of its figures each.
TPUS = {
    "v4": Chip("TPU v4", int(15.25 * GIB), 137.5, 614, 150, 3.125),
    "v5e": Chip("TPU v5 lite", int(15.75 * GIB), 197, 819, 200, 3.125),
    "v5p": Chip("TPU v5", int(95.74 * GIB), 459, 2765, 600, 6.25),
    "v6e": Chip("TPU v6 lite", int(31.25 * GIB), 918, 1638, 400, 12.5),
    "tpu7x": Chip("TPU7x", int(94.75 * GIB), 1153.5, 3690, 300, 6.25),
}
# NVIDIA's data sheets; NVLink is given there for both directions and halved here.
GPUS = (
    Chip("NVIDIA A100", None, 312, 2039, 300, 25),
    Chip("NVIDIA H100", None, 989, 3350, 450, 50),
    Chip("NVIDIA H200", None, 989, 4800, 450, 50),
    Chip("NVIDIA B200", None, 2250, 8000, 900, 50),
)


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip whose `device_kind` this is; None where its figures are not known."""
    known = [chip for chip in (*TPUS.values(), *GPUS) if device_kind.startswith(chip.prefix)]
    return max(known, key=lambda chip: len(chip.prefix), default=None)
