"""`FeatCal.fit`: live modules in, a calibrated copy out, and nothing but torch and the tables needed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import driftlens as dl
from driftlens.pipelines.calibrate import calibrate
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import IncompatibleModelsError
from tests.families import STACK
from tests.pipelines.calibrating import copied, request
from tests.zoo.cases import Stack, perturbed, with_seed
from tests.zoo.world import TASKS, World, clip, merged_weights, pixels


def samples(n: int = 24, width: int = 5) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(0))


def stacks() -> tuple[nn.Module, nn.Module, nn.Module]:
    base = with_seed(Stack)().eval()
    return base, perturbed(base, 1), perturbed(base, 2)


@pytest.mark.slow
def test_modules_give_the_weights_of_their_checkpoints(world: World, light: DriftRun, tmp_path: Path) -> None:
    run = calibrate(copied(light, tmp_path / "run"), request())
    data = {task: pixels(world.data(task), light.sample_ids(task, "calibration")).float() for task in TASKS}
    calibrator = dl.FeatCal(lam=0.05, rho=2.0, alpha=0.3)
    fitted = calibrator.fit(
        clip(merged_weights(world)).visual,
        clip(world.state("base")).visual,
        {task: clip(world.state(task)).visual for task in TASKS},
        data,
    )
    assert fitted is calibrator
    saved = load_file(run.path / "calibrations/featcal/weights.safetensors")
    for name, value in calibrator.model_.state_dict().items():
        torch.testing.assert_close(value, saved[f"visual.{name}"], rtol=1e-4, atol=1e-5)
    history = run.calibration("featcal")
    assert calibrator.history_["site"].tolist() == history["site"].tolist() == list(calibrator.modules_)
    assert calibrator.history_["objective_after"].tolist() == pytest.approx(history["objective_after"], rel=1e-3)


def test_the_modules_that_are_handed_in_stay_as_they_are() -> None:
    base, merged, expert = stacks()
    modules = {"base": base, "merged": merged.train(), "expert": expert}
    before = {name: {key: value.clone() for key, value in m.state_dict().items()} for name, m in modules.items()}
    calibrator = dl.FeatCal().fit(merged, base, {"task": expert}, {"task": samples()}, blocks="blocks")
    for name, module in modules.items():
        assert all(torch.equal(value, before[name][key]) for key, value in module.state_dict().items()), name
    assert merged.training and calibrator.model_ is not merged and not calibrator.model_.training
    moved = {
        key for key, value in calibrator.model_.state_dict().items() if not torch.equal(value, before["merged"][key])
    }
    assert moved and all(key.startswith("blocks.") for key in moved)


@STACK
@pytest.mark.shows("live", "sites")
def test_blocks_that_were_spoiled_are_found_again() -> None:
    base, _, expert = stacks()
    spoiled = copy.deepcopy(expert)
    spoiled.blocks.load_state_dict(base.blocks.state_dict())
    calibrator = dl.FeatCal(lam=1e-9, rho=1.0, alpha=1.0)
    model = calibrator.fit(spoiled, None, {"task": expert}, {"task": samples(64)}, blocks="blocks").model_
    for key, value in expert.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=1e-3)  # moments of float32 features
        is_spoiled = key.startswith("blocks.")
        assert not is_spoiled or (spoiled.state_dict()[key] - value).abs().max() > 0.02


class Twice(nn.Module):
    """A residual block; one of its modules may run twice in a pass."""

    def __init__(self, repeated: str = "") -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.repeated = repeated

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norm(x))
        x = x + self.second(self.norm(x) if self.repeated == "norm" else x)
        return x + self.first(x).tanh() if self.repeated == "first" else x


@pytest.mark.parametrize("block", [0, 1], ids=["first block", "last block"])
@pytest.mark.parametrize("repeated", ["norm", "first"])
def test_a_module_that_runs_twice_is_refused_and_can_be_left_out(repeated: str, block: int) -> None:
    """It has no one input to be calibrated on; to take one of the two would be silently wrong."""
    blocks = [Twice(repeated if at == block else "") for at in range(2)]
    base = nn.Sequential(*blocks, nn.Linear(5, 2)).eval()
    models = [perturbed(base, seed) for seed in (1, 2)]
    with pytest.raises(IncompatibleModelsError, match=f"{block}.{repeated} runs 2 times in one pass") as caught:
        dl.FeatCal().fit(models[0], base, {"a": models[1]}, {"a": samples()})
    assert "Set `sites` to patterns without it" in caught.value.hint
    fitted = dl.FeatCal().fit(models[0], base, {"a": models[1]}, {"a": samples()}, sites=["*.second"])
    assert list(fitted.modules_) == ["0.second", "1.second"]


class Tidy(nn.Module):
    """A linear site that reads the stream itself, and one whose output is activated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.down(torch.relu(self.up(x)))


class InPlace(Tidy):
    """The same function, which overwrites what its sites were fed and what they returned."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.first(x)
        x += self.down(torch.relu_(self.up(x)))
        return x


class Scaling(nn.Linear):
    """A linear module that does more than multiply and add."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.25 * super().forward(x)


class Mixed(nn.Module):
    """Three sites that read the same rows, the middle one without a bias."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.q, self.k, self.v = linear(5, 3), linear(5, 3, bias=False), linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) * self.k(x)
        return x + self.v(x) * torch.sigmoid(scores).sum(dim=1, keepdim=True)


def calibrated(block: Callable[[], nn.Module], calibrator: dl.FeatCal, num_samples: int) -> dict[str, Tensor]:
    """Weights of two such blocks and a linear head after calibration, and the objectives; random weights are alike."""
    base = with_seed(lambda: nn.Sequential(block(), block(), nn.Linear(5, 3)))().eval()
    experts = {"task": perturbed(base, 2)}
    data = {"task": samples(num_samples)}
    calibrator.fit(perturbed(base, 1), base, experts, data, blocks="", batch_size=num_samples)
    objectives = torch.tensor(calibrator.history_["objective_after"].tolist())
    return {**calibrator.model_.state_dict(), "objectives": objectives}


def assert_alike(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode], ids=["plain", "inference"])
@pytest.mark.parametrize("num_samples", [2, 24])  # row by row, and through the inputs
def test_blocks_that_work_in_place_are_calibrated_like_those_that_do_not(
    num_samples: int, mode: Callable[[], Any]
) -> None:
    with mode():
        found = calibrated(InPlace, dl.FeatCal(), num_samples)
    assert_alike(found, calibrated(Tidy, dl.FeatCal(), num_samples))


@pytest.mark.parametrize("num_samples", [2, 24])
def test_sites_with_and_without_a_bias_are_solved_together_as_if_each_were_alone(num_samples: int) -> None:
    together = calibrated(Mixed, dl.FeatCal(), num_samples)

    class Apart(Mixed):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x.clone()) * self.k(x.clone())
            return x + self.v(x.clone()) * torch.sigmoid(scores).sum(dim=1, keepdim=True)

    assert_alike(together, calibrated(Apart, dl.FeatCal(), num_samples))


def test_a_linear_module_is_solved_for_its_own_weight_whatever_its_class_adds() -> None:
    """With the first block alone calibrated, its inputs are those of the plain class."""
    for num_samples in (2, 24):
        found, want = (
            calibrated(lambda linear=linear: Mixed(linear), dl.FeatCal(), num_samples)
            for linear in (Scaling, nn.Linear)
        )
        first = [name for name in want if name.startswith("0.")]
        assert_alike(found, {name: want[name] for name in first})
