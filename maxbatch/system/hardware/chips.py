"""The table of accelerators: memory, and public figures for throughput and rankings."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

GIB = 2**30


class Peak(NamedTuple):
    """The rate that MFU refers to."""

    tflops: float  # of a device, 10^12 per second
    # the type of the products that reach it: "bfloat16", "int8" or "fp8"; "stated":
    # peak_tflops_per_device
    of: str

    def in_words(self) -> str:
        """Returns it for a message."""
        if self.of == "stated":
            return f"peak_tflops_per_device={self.tflops:g}"
        return f"the {self.of} peak, {self.tflops:,g} TFLOP/s per device"


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one JAX device: a chip, or half a chip of tpu7x. Bandwidths are in 10^9 bytes per
    second.
    """

    kinds: tuple[str, ...]  # beginnings of `device_kind`
    # usable bytes by the TPU compiler; None where `memory_stats` reports them
    hbm_bytes: int | None
    tflops: float  # dense bfloat16 peak, 10^12 per second
    hbm_gb_s: float
    ici_gb_s: float  # to other devices of its slice or node, one way, all links together
    clock_ghz: float | None = None  # clock of the compiler's cycles; None if it counts none
    # dense peaks of 8-bit products; None where they are no faster than bfloat16's
    int8_tflops: float | None = None
    fp8_tflops: float | None = None

    def peak(self, quantization: str) -> Peak:
        """Returns the peak of products in 8 bits (`quantization`), or bfloat16's where the chip has
        none of its own.
        """
        eight_bits = {"int8": self.int8_tflops, "fp8": self.fp8_tflops}.get(quantization)
        return (
            Peak(self.tflops, "bfloat16") if eight_bits is None else Peak(eight_bits, quantization)
        )


# TPUs by the beginning of a topology's name. Memory: as libtpu 0.0.42 to 0.0.52 state when a
# program needs more. Rates: the table of https://docs.cloud.google.com/tpu/docs/tpu7x, which
# compares v5p, v6e and tpu7x, and the pages of v4 and v5e beside it; their ICI figures cover both
# directions and are halved here. Clocks: the bfloat16 peak over products of a device's matrix units
# per cycle (v4, v5p: 8 of 128x128; v5e: 4 of them; v6e, a tpu7x core: 4 of 256x256 by the
# compiler's own peak). 1.05 GHz is also in Jouppi et al. 2023, TPU v4
# (https://arxiv.org/abs/2304.01433), and 1.5 and
# 1.75 GHz in https://jax-ml.github.io/scaling-book/tpus. Peaks in 8 bits: the pages of v5e, v5p, v6e and tpu7x; v4's
# int8, and fp8 on v5p and v6e, have bfloat16's peak there, and int8 on tpu7x is not listed.
TPUS = {
    "v4": Chip(("TPU v4",), int(31.75 * GIB), 275, 1228, 300, 1.05),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), int(15.75 * GIB), 197, 819, 200, 1.5, int8_tflops=393),
    "v5p": Chip(("TPU v5",), int(95.74 * GIB), 459, 2765, 600, 1.75, int8_tflops=918),
    "v6e": Chip(
        ("TPU v6 lite", "TPU v6e"), int(31.25 * GIB), 918, 1638, 400, 1.75, int8_tflops=1836
    ),
    "tpu7x": Chip(("TPU7x",), int(94.75 * GIB), 1153.5, 3690, 300, 2.2, fp8_tflops=2307),
}
# NVIDIA's data sheets; NVLink figures cover both directions and are halved here.
GPUS = (
    Chip(("NVIDIA A100",), None, 312, 2039, 300, int8_tflops=624),
    Chip(("NVIDIA H100",), None, 989, 3350, 450, int8_tflops=1979, fp8_tflops=1979),
    Chip(("NVIDIA H200",), None, 989, 4800, 450, int8_tflops=1979, fp8_tflops=1979),
    Chip(("NVIDIA B200",), None, 2250, 8000, 900, int8_tflops=4500, fp8_tflops=4500),
)


def mfu_peak(chip: Chip | None, quantization: str, stated_tflops: float | None) -> Peak | None:
    """Returns the peak that MFU refers to; None where it is unknown.

    Args:
      chip: the device; None: its figures are not known.
      quantization: the type of the layers' products; "": none.
      stated_tflops: `peak_tflops_per_device`.
    """
    if stated_tflops:
        return Peak(stated_tflops, "stated")
    return chip.peak(quantization) if chip else None


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip of a `device_kind`, or None if its figures are unknown."""
    known = {kind: chip for chip in (*TPUS.values(), *GPUS) for kind in chip.kinds}
    matching = [kind for kind in known if device_kind.startswith(kind)]
    return known[max(matching, key=len)] if matching else None
