from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from driftlens.suites.drawing import tasks
from driftlens.suites.recipe import Schedule
from driftlens.suites.training import (
    SHIFT,
    Captions,
    Pictures,
    accuracy,
    batches,
    build_clip,
    class_embeddings,
    contrastive_loss,
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
