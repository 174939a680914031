"""Everything here, in a process of its own: what torch is told of a device late, it half ignores, and never forgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.accelerator import NAME, missing


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes of many tests, one after the other
def test_all_holds_on_a_pretended_accelerator(device: torch.device) -> None:
    if device.type == NAME or torch.cuda.is_available():
        pytest.skip("these tests run on an accelerator already, or beside one")
    if reason := missing():
        pytest.skip(reason)
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-rs", "--slow", "--device", NAME, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parents[1])
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
