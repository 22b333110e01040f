"""A fingerprint of rows: the sum of their hashes modulo 2^64 (`maxbatch.system.hashing`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from maxbatch.system.hashing import carry, limb_sums, row_hashes, to_hex


def fingerprint(blocks: Iterable[Mapping[str, np.ndarray]]) -> str:
    """Returns the fingerprint of all rows of blocks (`tokens`, `segments`, `weights` [n, L]), in
    numpy.
    """
    limbs = np.zeros(4, np.uint32)
    for block in blocks:
        hashes = row_hashes(np, block["tokens"], block["segments"], block["weights"])
        limbs = carry(np, limbs + carry(np, limb_sums(np, hashes)))
    return to_hex(limbs)
