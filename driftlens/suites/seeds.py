"""Independent random streams from one root seed."""

from __future__ import annotations

import zlib

import numpy as np


def stream(seed: int, purpose: str) -> int:
    """A seed for one purpose; purposes never share random numbers, and adding one leaves the others as they are."""
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])
    # 63 bits, because torch takes signed seeds.
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
