"""Repairs beside FeatCal and residual calibration: each against its equations, written down another way."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from driftlens.calibration.calibrator import FinalFeatures, TrainingContext
from driftlens.calibration.surgery import ProbSurgery, Surgery, _prob_surgery_loss
from driftlens.models.chain import Layer
from driftlens.utils.errors import IncompatibleModelsError
from tests.calibration.helpers import quiet

LAYER = Layer(3, "head", "head", {}, lambda parameters, state, side, tap=None: state)
WIDTH, COUNT = 6, 40


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def course(seed: int = 0) -> TrainingContext:
    return TrainingContext(seeded(seed), quiet)


def features(seed: int = 0, shape: tuple[int, ...] = (COUNT, WIDTH), mask: Tensor | None = None) -> FinalFeatures:
    """The expert's are a linear map of the merged model's, which differs by seed, and some noise."""
    draw = seeded(seed)
    merged = torch.randn(shape, generator=draw)
    turn = torch.eye(WIDTH) + 0.4 * torch.randn(WIDTH, WIDTH, generator=draw)
    expert = merged @ turn + 0.05 * torch.randn(shape, generator=draw)
    return FinalFeatures(LAYER, f"task {seed}", merged, expert, mask)


def distance(of: FinalFeatures, repaired: Tensor) -> float:
    return float((repaired - of.expert).square().sum(-1).mean())


@pytest.mark.parametrize("kind", [Surgery, ProbSurgery])
def test_training_starts_at_the_merged_model(kind: type[Surgery | ProbSurgery]) -> None:
    of = features()
    found = kind(steps=1, lr=1e-12).train(of, course())
    torch.testing.assert_close(found(of.merged), of.merged, rtol=0, atol=1e-9)


def test_prob_surgerys_loss_is_that_of_normal_distributions() -> None:
    draw = seeded()
    merged, expert, noise = (torch.randn(9, WIDTH, generator=draw) for _ in range(3))
    down, mean, spread = (torch.randn(3, WIDTH, generator=draw), *torch.randn(2, WIDTH, 3, generator=draw))
    hidden = torch.relu(merged @ down.T)
    own = torch.distributions.Normal(hidden @ mean.T, torch.exp(hidden @ spread.T).sqrt())
    away = torch.distributions.kl_divergence(own, torch.distributions.Normal(0.0, 1.0)).sum(1).mean()
    wanted = (merged - (own.mean + own.stddev * noise) - expert).abs().mean() + 0.3 * away
    found = _prob_surgery_loss(merged, expert, noise, [down, mean, spread], 0.3)
    torch.testing.assert_close(found, wanted)
    none = torch.zeros(WIDTH, 3)
    start = _prob_surgery_loss(merged, expert, 0 * noise, [down, none, none], 1e6)
    torch.testing.assert_close(start, (merged - expert).abs().mean())


@pytest.mark.slow
@pytest.mark.parametrize("method", [Surgery(rank=8, steps=400), ProbSurgery(rank=16, steps=400)])
def test_a_repair_of_one_task_serves_that_task_and_no_other(method: Surgery | ProbSurgery) -> None:
    one, other = features(1), features(2)
    found = [method.train(of, course()) for of in (one, other)]
    assert distance(one, found[0](one.merged)) < 0.8 * distance(one, one.merged)
    assert distance(one, found[1](one.merged)) > distance(one, one.merged)


@pytest.mark.parametrize("method", [Surgery(steps=50), ProbSurgery(steps=50)])
def test_the_same_seed_gives_the_same_map_and_what_is_saved_is_all_of_it(
    method: Surgery | ProbSurgery,
) -> None:
    of = features()
    first, second = (method.train(of, course(3)) for _ in range(2))
    again = type(method).attachment(first.tensors())
    assert torch.equal(first(of.merged), second(of.merged)) and torch.equal(again(of.merged), first(of.merged))


def test_padding_teaches_nothing() -> None:
    mask = torch.rand(COUNT, 5, generator=seeded(7)) < 0.7
    of = features(shape=(COUNT, 5, WIDTH), mask=mask)
    spoiled = dataclasses.replace(of, merged=torch.where(mask[..., None], of.merged, 1e3))
    merged, _ = of.rows()
    assert merged.shape == (int(mask.sum()), WIDTH)
    for method in (Surgery(steps=20), ProbSurgery(steps=20)):
        own, other = (method.train(each, course()) for each in (of, spoiled))
        assert torch.equal(own.up, other.up)


def test_channels_before_space_are_refused() -> None:
    with pytest.raises(IncompatibleModelsError, match="channels before space"):
        FinalFeatures(LAYER, "task", torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)).rows()
