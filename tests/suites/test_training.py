from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from driftlens.suites.drawing import tasks
from driftlens.suites.recipe import Schedule
from driftlens.suites.training import (
    LARGEST_GRADIENT,
    SHIFT,
    Captions,
    Descent,
    Muon,
    Pictures,
    accuracy,
    batches,
    build_clip,
    class_embeddings,
    contrastive_loss,
    orthogonalized,
    shifted,
    tokenizer,
    train_expert,
)
from tests.suites.conftest import TINY


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    return Pictures(tasks["letters"], *tasks["letters"].pictures("train", 40, 0))


def test_the_contrastive_loss_is_the_mean_of_both_cross_entropies(generator: torch.Generator):
    scores = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    position = torch.tensor([0, 2, 1, 2, 2])
    by_picture = [
        -math.log(row.exp()[at] / row.exp().sum()) for row, at in zip(scores, position, strict=True)
    ]
    by_caption = []
    for caption in range(3):
        owners = (position == caption).nonzero().flatten()
        column = scores[:, caption]
        by_caption.append(-np.mean([math.log(column.exp()[i] / column.exp().sum()) for i in owners]))
    expected = 0.5 * (np.mean(by_picture) + np.mean(by_caption))
    assert contrastive_loss(scores, position).item() == pytest.approx(expected, rel=1e-12)


def test_each_pass_shows_every_sample_once(generator: torch.Generator):
    schedule = Schedule(steps=9, batch=4, rate=0)
    rows = torch.cat(list(batches(12, schedule, generator))).view(3, 12)
    assert all(torch.equal(one.sort().values, torch.arange(12)) for one in rows)
    assert not torch.equal(rows[0], rows[1])


def test_a_batch_larger_than_the_set_is_filled(generator: torch.Generator):
    (rows,) = batches(3, Schedule(steps=1, batch=7, rate=0), generator)
    assert torch.bincount(rows, minlength=3).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


def test_shifting_moves_the_middle_and_repeats_the_edge(generator: torch.Generator):
    row = torch.arange(8.0).expand(1, 1, 8, 8)
    seen = {tuple(shifted(row, generator)[0, 0, 0].tolist()) for _ in range(200)}
    possible = {
        tuple(float(min(max(column + move, 0), 7)) for column in range(8))
        for move in range(-SHIFT, SHIFT + 1)
    }
    assert seen == possible


@pytest.mark.parametrize(("vague", "telling"), [(0.0, 40), (1.0, 0)], ids=["telling", "vague"])
def test_captions_tell_the_class_unless_they_are_vague(
    pictures: Pictures, vague: float, telling: int, generator: torch.Generator
):
    captions = Captions([pictures], vague, generator)
    names = [pictures.task.class_names[label] for label in pictures.labels]
    tells = [
        all(f" {name}" in captions.texts[choice] for choice in choices)
        for name, choices in zip(names, captions.choices.tolist(), strict=True)
    ]
    assert sum(tells) == telling


def test_pictures_of_one_class_get_one_caption_within_a_batch(pictures: Pictures, generator: torch.Generator):
    captions = Captions([pictures], 0.0, generator)
    rows = torch.arange(40)
    drawn = {tuple(captions.drawn(rows, generator).tolist()) for _ in range(40)}
    assert len(drawn) == len(pictures.task.templates)
    labels = pictures.labels.tolist()
    assert all(len(set(zip(labels, one, strict=True))) == len(set(labels)) for one in drawn)


def test_building_a_clip_leaves_the_global_random_numbers_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = build_clip(TINY.model_config(), 5)
    assert torch.equal(torch.rand(3), expected)
    again, other = build_clip(TINY.model_config(), 5), build_clip(TINY.model_config(), 6)
    assert torch.equal(first.visual.proj, again.visual.proj)
    assert not torch.equal(first.visual.proj, other.visual.proj)


def test_class_embeddings_equal_those_of_open_clip(pictures: Pictures):
    from open_clip import build_zero_shot_classifier

    clip, tokenize, task = build_clip(TINY.model_config(), 0), tokenizer(16), pictures.task
    expected = build_zero_shot_classifier(clip, tokenize, task.class_names, task.templates)
    torch.testing.assert_close(class_embeddings(clip, tokenize, task), expected.T)


def test_accuracy_counts_the_nearest_class_by_cosine():
    towers = torch.eye(3)
    features = torch.tensor([[9.0, 1, 0], [0.1, 0.2, 0], [0, 1, 5], [1, 0, 0]])
    labels = torch.tensor([0, 1, 1, 0])
    assert accuracy(nn.Identity(), features, labels, towers) == 0.75


def test_training_an_expert_lowers_its_loss_and_touches_nothing_but_the_tower(pictures: Pictures):
    clip = build_clip(TINY.model_config(), 0)
    before = {key: tensor.clone() for key, tensor in clip.state_dict().items()}
    head = 20 * class_embeddings(clip, tokenizer(16), pictures.task)
    kept, losses = head.clone(), []
    schedule = Schedule(steps=30, batch=40, matrix_rate=0.02, rate=5e-3)
    train_expert(clip.visual, pictures, head, schedule, 0, lambda _, x: losses.append(x))
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    changed = {key for key, tensor in clip.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == {key for key in before if key.startswith("visual.")}
    assert torch.equal(head, kept)


def test_pixels_are_those_of_open_clips_own_preprocessing(pictures: Pictures):
    from open_clip import image_transform
    from PIL import Image

    own = image_transform(32, is_train=False)
    expected = torch.stack([own(Image.fromarray(image)) for image in pictures.images[:3]])
    torch.testing.assert_close(pictures.pixels()[:3], expected)


def test_orthogonalizing_keeps_singular_vectors_and_evens_out_singular_values(generator: torch.Generator):
    left, right = (torch.linalg.qr(torch.randn(n, 6, generator=generator)).Q for n in (8, 20))
    values = torch.tensor([4.0, 2.0, 1.0, 0.6, 0.4, 0.3])
    seen = left.T @ orthogonalized(left * values @ right.T) @ right
    assert (seen - torch.diag(seen.diagonal())).abs().max() < 1e-4
    assert ((seen.diagonal() > 0.6) & (seen.diagonal() < 1.3)).all()


def test_a_tall_matrix_is_treated_as_its_transpose(generator: torch.Generator):
    matrix = torch.randn(12, 5, generator=generator)
    torch.testing.assert_close(orthogonalized(matrix), orthogonalized(matrix.T).T)


def test_a_fused_projection_moves_like_its_three_parts(generator: torch.Generator):
    weight, gradient = torch.randn(2, 12, 4, generator=generator)
    fused = nn.Parameter(weight.clone())
    parts = [nn.Parameter(part.clone()) for part in weight.chunk(3)]
    fused.grad = gradient.clone()
    for part, piece in zip(parts, gradient.chunk(3), strict=True):
        part.grad = piece.clone()
    Muon([fused], 0.1, 0.5).step()
    Muon(parts, 0.1, 0.5).step()
    assert not torch.equal(fused, weight)
    torch.testing.assert_close(fused.data, torch.cat([part.data for part in parts]))


def test_a_step_does_not_depend_on_the_size_of_the_gradient(generator: torch.Generator):
    gradient = torch.randn(4, 6, generator=generator)
    moved = []
    for size in (1e-3, 1e3):
        parameter = nn.Parameter(torch.zeros(4, 6))
        parameter.grad = size * gradient
        Muon([parameter], 0.1, 0.0).step()
        moved.append(parameter.data)
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-5)


class Net(nn.Module):
    """One block matrix, and parameters that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 2)


def test_rates_rise_to_their_peak_and_fall_to_nothing():
    schedule = Schedule(steps=100, batch=1, rate=1, warmup=0.1)
    rates = [schedule.share_at(step) for step in range(100)]
    peak = rates.index(max(rates))
    assert 0 < rates[0] < rates[5] < rates[peak] <= 1 and peak in (8, 9, 10)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-3


def test_every_parameter_moves_and_only_block_matrices_by_a_fixed_amount():
    torch.manual_seed(0)
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.named_parameters()}
    schedule = Schedule(steps=4, batch=1, matrix_rate=0.1, rate=1e-3, weight_decay=0.0, warmup=0.0)
    Descent(net, schedule).step(net.head(net.resblocks[0](torch.randn(5, 3))).square().sum(), 0)
    moved = {name: tensor - before[name] for name, tensor in net.named_parameters()}
    assert all((change != 0).any() for change in moved.values())
    # AdamW's first step is its rate in every coordinate; Muon's has a spectral norm near its own.
    assert moved["head.weight"].abs().max() < 1.01e-3
    assert 0.06 < torch.linalg.matrix_norm(moved["resblocks.0.weight"], ord=2) < 0.13


def test_fine_tuning_moves_along_the_gradient_and_cuts_a_long_one(generator: torch.Generator):
    net = Net()
    x = torch.randn(5, 3, generator=generator)

    def loss() -> torch.Tensor:
        return 1e3 * net.head(net.resblocks[0](x)).square().sum()

    gradients = torch.autograd.grad(loss(), list(net.parameters()))
    size = torch.cat([each.flatten() for each in gradients]).norm()
    assert size > LARGEST_GRADIENT
    before = [each.detach().clone() for each in net.parameters()]
    Descent(net, Schedule(steps=4, batch=1, rate=0.1, warmup=0.0)).step(loss(), 0)
    for start, each, gradient in zip(before, net.parameters(), gradients, strict=True):
        # Nesterov momentum from rest: the first step is (1 + 0.9) times the rate along the cut gradient.
        torch.testing.assert_close(each.data, start - 0.19 * LARGEST_GRADIENT / size * gradient)
