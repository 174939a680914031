"""The walk and the closed forms against a slow implementation that shares no helper with them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from driftlens.calibration.featcal import FeatCal
from tests.calibration.helpers import TASKS, calibrated, subject
from tests.quick import few
from tests.reference import calibration as reference
from tests.zoo.solvable import WORLDS

N = 4
TOLERANCE = 1e-9  # of |dW|_F / |W|_F, float64; both sides lose some digits to their solves


@functools.cache
def slow(
    name: str, settings: reference.Settings, token_weights: reference.TokenWeights | None = None
) -> dict[tuple[int, str], Tensor]:
    """What the slow reference finds for a subject, by layer and the product's parameter name."""
    models = subject(name, n=N)
    world, modules, inputs = models.world, models.modules, models.inputs
    features = {
        task: {
            role: [world.enter(modules[model], inputs, sample) for sample in range(N)]
            for role, model in (("merged", "merged"), ("expert", f"expert:{task}"))
        }
        for task in TASKS
    }
    found = reference.calibrate(
        world.blocks(modules["merged"]),
        world.blocks(modules["base"]),
        {task: world.blocks(modules[f"expert:{task}"]) for task in TASKS},
        features,
        lambda block, state, sample: world.run(block, state, inputs, sample),
        settings,
        token_weights or (lambda block, name, sample: None),
    )
    ours = {theirs: name for name, theirs in world.names.items()}
    return {
        (index + 2, f"{ours.get(module, module)}.{part}"): value
        for index, new in enumerate(found)
        for (module, part), value in ((name.rsplit(".", 1), value) for name, value in new.items())
    }


def assert_equal_parameters(found: dict[tuple[int, str], Tensor], want: dict[tuple[int, str], Tensor]) -> None:
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert float((found[key].cpu() - value).norm()) <= TOLERANCE * float(value.norm()), key


def emphasis(block: int, name: str, sample: int) -> Tensor | None:
    """Of the last block, tokens other than CLS count 0.01, except for keys and values."""
    if block < 2 or name in ("k", "v"):
        return None
    return torch.tensor([1.0] + [0.01] * 16, dtype=torch.float64)


@pytest.mark.parametrize("name", few(WORLDS, ["open_clip_vit", "t5"]))
def test_every_architecture_agrees_with_the_slow_reference(name: str, device: torch.device) -> None:
    found = calibrated(subject(name, n=N, device=device), FeatCal(lam=0.03, rho=1.7, alpha=0.4))
    assert_equal_parameters(found, slow(name, reference.Settings(lam=0.03, rho=1.7, alpha=0.4)))


@pytest.mark.slow
@pytest.mark.parametrize("inputs", few(["merged", "expert"], ["merged"]))
@pytest.mark.parametrize("name", list(WORLDS)[:1])
def test_features_of_other_models_agree_with_the_slow_reference(name: str, inputs: str, device: torch.device) -> None:
    found = calibrated(subject(name, n=N, device=device), FeatCal(alpha=0.4, inputs=inputs))  # type: ignore[arg-type]
    assert_equal_parameters(found, slow(name, reference.Settings(alpha=0.4, inputs=inputs)))
    deployed = slow(name, reference.Settings(alpha=0.4))
    with pytest.raises(AssertionError):
        assert_equal_parameters(found, deployed)


@pytest.mark.parametrize(
    ("name", "rho", "alpha"),
    [
        pytest.param("t5", 2.0, 0.6, marks=pytest.mark.slow),
        ("llama", 0.5, 0.15),
        pytest.param("qwen3", 0.5, 0.15, marks=pytest.mark.slow),
    ],
)
def test_language_models_agree_where_lambda_is_small(
    name: str, rho: float, alpha: float, device: torch.device
) -> None:
    """The paper's settings for FLAN-T5 and Llama, of which the weights are to be good to 1e-6."""
    found = calibrated(subject(name, n=N, device=device), FeatCal(lam=1e-5, rho=rho, alpha=alpha))
    want = slow(name, reference.Settings(lam=1e-5, rho=rho, alpha=alpha))
    assert found.keys() == want.keys()
    for key, value in want.items():
        assert float((found[key].cpu() - value).norm()) <= 1e-6 * float(value.norm()), key


@pytest.mark.slow
def test_the_authors_token_weights_agree_with_the_slow_reference(device: torch.device) -> None:
    name = "open_clip_vit"
    found = calibrated(
        subject(name, n=N, device=device), FeatCal(rho=2.2, alpha=0.25, last_block_tokens="cls_emphasis")
    )
    assert_equal_parameters(found, slow(name, reference.Settings(rho=2.2, alpha=0.25), emphasis))
