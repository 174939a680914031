"""Repairs beside FeatCal and residual calibration: each against its equations, written down another way."""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError, SpecError
from driftlens.calibration.descent import uniform
from driftlens.calibration.react import ReACT
from driftlens.calibration.surgery import LowRank, ProbSurgery, Surgery, SurgeryV2, prob_surgery_loss
from driftlens.calibration.svc import SVC, stretched
from driftlens.engine.calibrating import Step
from driftlens.engine.training import BoundaryFeatures, Course
from driftlens.models.chain import Layer
from tests.calibration.helpers import TASKS, quiet, subject, trained

LAYER = Layer(3, "head", "head", {}, lambda parameters, state, side, tap=None: state)
WIDTH, COUNT = 6, 40


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def course(seed: int = 0) -> Course:
    return Course(seeded(seed), quiet)


def features(
    seed: int = 0, shape: tuple[int, ...] = (COUNT, WIDTH), mask: Tensor | None = None
) -> BoundaryFeatures:
    """The expert's are a linear map of the merged model's, which differs by seed, and some noise."""
    draw = seeded(seed)
    merged = torch.randn(shape, generator=draw)
    turn = torch.eye(WIDTH) + 0.4 * torch.randn(WIDTH, WIDTH, generator=draw)
    expert = merged @ turn + 0.05 * torch.randn(shape, generator=draw)
    return BoundaryFeatures(LAYER, f"task {seed}", merged, expert, mask)


def distance(of: BoundaryFeatures, repaired: Tensor) -> float:
    return float((repaired - of.expert).square().sum(-1).mean())


def test_surgery_is_what_plain_modules_learn() -> None:
    """The same start and all samples at once, by `nn.Linear`, `nn.L1Loss` and an optimiser of its own."""
    of, steps = features(), 30
    found = Surgery(rank=4, steps=steps, batch=COUNT).train(of, course(5))
    down, up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
    with torch.no_grad():
        down.weight.copy_(uniform(4, WIDTH, seeded(5)))
        up.weight.zero_()
    optimiser = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.l1_loss(of.merged - up(torch.relu(down(of.merged))), of.expert).backward()
        optimiser.step()
    torch.testing.assert_close(found.down, down.weight.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.up, up.weight.detach(), rtol=1e-4, atol=1e-6)
    assert found.up.abs().max() > 1e-3


def test_the_start_is_within_the_bounds_of_a_linear_module() -> None:
    own = nn.Linear(50, 400, bias=False).weight.detach().abs().max()
    for drawn in (uniform(400, 50, seeded()), uniform(1, 4000, seeded(), 50)):  # of its bias, too
        assert float(drawn.abs().max()) == pytest.approx(float(own), rel=0.01)


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
    found = prob_surgery_loss(merged, expert, noise, down, mean, spread, weight=0.3)
    torch.testing.assert_close(found, wanted)
    none = torch.zeros(WIDTH, 3)
    start = prob_surgery_loss(merged, expert, 0 * noise, down, none, none, weight=1e6)
    torch.testing.assert_close(start, (merged - expert).abs().mean())


@pytest.mark.parametrize("method", [Surgery(rank=8, steps=400), ProbSurgery(rank=16, steps=400), ReACT()])
def test_a_repair_of_one_task_serves_that_task_and_no_other(method: Surgery | ProbSurgery | ReACT) -> None:
    one, other = features(1), features(2)
    found = [method.train(of, course()) for of in (one, other)]
    assert distance(one, found[0](one.merged)) < 0.8 * distance(one, one.merged)
    assert distance(one, found[1](one.merged)) > distance(one, one.merged)


@pytest.mark.parametrize("method", [Surgery(steps=50), ProbSurgery(steps=50), ReACT()])
def test_the_same_seed_gives_the_same_map_and_what_is_saved_is_all_of_it(
    method: Surgery | ProbSurgery | ReACT,
) -> None:
    of = features()
    first, second = (method.train(of, course(3)) for _ in range(2))
    again = type(method).attachment(first.tensors())
    assert torch.equal(first(of.merged), second(of.merged)) and torch.equal(
        again(of.merged), first(of.merged)
    )


def test_unit_features_stay_unit_where_nothing_is_learnt() -> None:
    of = features()
    flag = LowRank(torch.ones(2, WIDTH), torch.zeros(WIDTH, 2), normalize=True)
    torch.testing.assert_close(flag(of.merged).norm(dim=1), torch.ones(COUNT))
    assert (
        Surgery.attachment(flag.tensors()).normalize
        and not Surgery.attachment(LowRank(flag.down, flag.up).tensors()).normalize
    )


def test_react_solves_its_normal_equations() -> None:
    of, lam = features(), 0.03
    found = ReACT(lam).train(of, course()).matrix.double()
    merged, expert = of.merged.double().numpy(), of.expert.double().numpy()
    gram = merged.T @ merged
    weight = lam * np.linalg.norm(gram)
    wanted = np.linalg.solve(gram + weight * np.eye(WIDTH), merged.T @ expert + weight * np.eye(WIDTH)).T
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ReACT(1e9).train(of, course()).matrix, torch.eye(WIDTH), rtol=0, atol=1e-6)
    twice = dataclasses.replace(of, merged=of.merged.repeat(2, 1), expert=of.expert.repeat(2, 1))
    torch.testing.assert_close(ReACT(lam).train(twice, course()).matrix.double(), found)


def test_padding_teaches_nothing() -> None:
    mask = torch.rand(COUNT, 5, generator=seeded(7)) < 0.7
    of = features(shape=(COUNT, 5, WIDTH), mask=mask)
    spoiled = dataclasses.replace(of, merged=torch.where(mask[..., None], of.merged, 1e3))
    merged, expert = of.rows()
    assert merged.shape == (int(mask.sum()), WIDTH)
    flat = BoundaryFeatures(LAYER, "flat", merged, expert)
    wanted = ReACT().train(flat, course()).matrix
    torch.testing.assert_close(ReACT().train(spoiled, course()).matrix, wanted)
    for method in (Surgery(steps=20), ProbSurgery(steps=20)):
        own, other = (method.train(each, course()) for each in (of, spoiled))
        assert torch.equal(own.up, other.up)


def test_channels_before_space_are_refused() -> None:
    with pytest.raises(IncompatibleModelsError, match=r"\[2, 3, 4, 4\], channels before space"):
        BoundaryFeatures(LAYER, "task", torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)).rows()


def test_svc_is_its_definition_direction_by_direction() -> None:
    rng = np.random.default_rng(0)
    experts = [rng.normal(size=(5, 7)) for _ in range(3)]
    merged = 0.3 * sum(experts)
    left, sizes, right = np.linalg.svd(merged, full_matrices=False)
    wanted = np.zeros_like(merged)
    for at in range(5):
        own = sizes[at] * right[at]
        shares = [max(0.1, own @ (left[:, at] @ one) / np.sum((left[:, at] @ one) ** 2)) for one in experts]
        wanted += len(experts) / sum(shares) * np.outer(left[:, at], own)
    found = stretched(torch.from_numpy(merged), map(torch.from_numpy, experts), 0.1)
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-12)


def test_svc_gives_equal_experts_back_at_any_scaling_and_nothing_where_nothing_changed() -> None:
    expert = torch.randn(4, 6, generator=seeded(), dtype=torch.float64)
    for scaling in (0.2, 1.0, 2.5):
        torch.testing.assert_close(stretched(scaling * expert, [expert, expert], 0.1), expert)
    assert not stretched(0 * expert, [0 * expert], 0.1).any()
    with pytest.raises(SpecError, match="there is no base"):
        SVC().check(has_base=False)
    with pytest.raises(SpecError, match="alpha is 0"):
        SVC(0).check()


class BehindTheLast(SurgeryV2):
    """SurgeryV2 with one boundary."""

    def boundaries(self, num_layers: int) -> list[int]:
        return [num_layers]


def test_surgery_v2_with_one_boundary_is_surgery() -> None:
    models, settings = subject(n=6), {"rank": 3, "steps": 12, "batch": 4}
    found, wanted = (trained(models, kind(**settings)) for kind in (BehindTheLast, Surgery))
    assert found.keys() == wanted.keys() and len(found) == len(TASKS)
    for place, each in found.items():
        # Surgery keeps its maps in single precision.
        torch.testing.assert_close(each.down, wanted[place].down.double(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(each.up, wanted[place].up.double(), rtol=1e-4, atol=1e-6)
        assert each.up.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["open_clip_vit", "llama"])
def test_surgery_v2_is_what_plain_modules_learn_in_the_model(name: str) -> None:
    """All samples at once, maps as linear modules between the layers, token means by hand where texts are padded."""
    models, steps = subject(name, n=4), 4
    found = trained(models, SurgeryV2(rank=2, steps=steps, batch=4))
    chain, task = models.pool.chain, TASKS[1]
    (batch,) = models.batches()
    start, side = chain.start(batch.inputs)

    def means(features: Tensor, stream: str) -> Tensor:
        mask = side.mask(stream)
        if features.dim() == 2:
            return features
        kept = [row if mask is None else row[mask[at].bool()] for at, row in enumerate(features)]
        return torch.stack([row.mean(0) for row in kept])

    def walked(variant: str, maps: dict[int, nn.Sequential]) -> list[Tensor]:
        state, seen = start, []
        for layer in chain.layers:
            state = dict(models.pool.layer_map(variant, layer, task)(state, side))
            if layer.index > 1:
                if layer.index in maps:
                    state[layer.stream] = state[layer.stream] - maps[layer.index](state[layer.stream])
                seen.append(means(state[layer.stream], layer.stream))
        return seen

    with torch.no_grad():
        wanted = walked(f"expert:{task}", {})
    generator, maps = torch.Generator().manual_seed(zlib.crc32(f"{len(chain.layers)} {task}".encode())), {}
    for at, rows in enumerate(wanted, 2):
        width = rows.shape[1]
        maps[at] = nn.Sequential(
            nn.Linear(width, 2, bias=False), nn.ReLU(), nn.Linear(2, width, bias=False)
        ).double()
        with torch.no_grad():
            maps[at][0].weight.copy_(uniform(2, width, generator))
            maps[at][2].weight.zero_()
    optimiser = torch.optim.Adam([leaf for each in maps.values() for leaf in each.parameters()], lr=1e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        pairs = zip(walked("merged", maps), wanted, strict=True)
        sum(nn.functional.l1_loss(own, expert) for own, expert in pairs).backward()
        optimiser.step()
    for at, each in maps.items():
        torch.testing.assert_close(found[task, at].down, each[0].weight.detach(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found[task, at].up, each[2].weight.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_surgery_v2_starts_at_the_merged_model_and_comes_nearer() -> None:
    models, losses = subject(n=4), []
    for trainer in (SurgeryV2(steps=1, lr=1e-12, batch=4), SurgeryV2(rank=8, steps=150, batch=4, lr=1e-2)):
        parts = {"a": models.samples(2)["a"]}
        steps: list[Step] = []
        for found in trained(models, trainer, parts=parts, on_step=steps.append).values():
            if trainer.steps == 1:
                torch.testing.assert_close(found.up, 0 * found.up, rtol=0, atol=1e-9)
        losses.append([step.loss for step in steps if step.loss is not None][-1])
    assert losses[1] < 0.7 * losses[0]
