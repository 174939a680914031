"""Several processes, each with an accelerator of its own, of which gloo knows nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from driftlens.base import devices
from driftlens.base.team import Team
from tests.accelerator import NAME
from tests.team.threads import teamed

pytestmark = pytest.mark.slow


def test_a_process_takes_the_device_of_its_number(sim: torch.device) -> None:
    for rank, wanted in enumerate((1, 0, 1, 0), start=1):
        assert devices.use_device(rank) == torch.device(NAME, wanted)
        assert torch.ones(1, device=NAME).device.index == wanted


def test_sums_and_solutions_go_from_device_to_device(sim: torch.device) -> None:
    def work(team: Team) -> list[Tensor]:
        summed, shared, added = (
            torch.full((2, 3), 1.0 + team.rank, device=f"{NAME}:{team.rank}") for _ in range(3)
        )
        team.sum([summed], to=0)
        team.share([shared], of=1)
        team.add([added], of=1, to=0)
        return [summed, shared, added]

    found = teamed(2, work)
    assert [[float(value.mean()) for value in of] for of in found] == [[3.0, 2.0, 3.0], [2.0, 2.0, 2.0]]
    assert [{value.device.index for value in of} for of in found] == [{0}, {1}]
