from __future__ import annotations

import itertools

import numpy as np
import pytest
from PIL import Image

from driftlens.suites.drawing import (
    CANVAS,
    PURPOSES,
    SIZE,
    DrawnTask,
    dark_and_light,
    luminance,
    photographed,
    placed,
    tasks,
)
from driftlens.suites.tasks import views
from driftlens.suites.tasks.characters import handwriting


@pytest.fixture(params=list(tasks))
def task(request: pytest.FixtureRequest) -> DrawnTask:
    return tasks[request.param]


def test_there_are_eight_tasks_of_eight_classes_or_more():
    assert len(tasks) == 8
    assert all(len(set(task.class_names)) == len(task.class_names) >= 8 for task in tasks.values())


def test_the_seed_decides_every_pixel(task: DrawnTask):
    first, again, other = (task.pictures("train", 12, seed) for seed in (3, 3, 4))
    assert np.array_equal(first[0], again[0])
    assert np.array_equal(first[1], again[1])
    assert not any(np.array_equal(one, two) for one, two in zip(first[0], other[0], strict=True))


def test_no_picture_occurs_twice_within_or_across_purposes(task: DrawnTask):
    drawn = [image.tobytes() for purpose in PURPOSES for image in task.pictures(purpose, 60, 0)[0]]
    assert len(set(drawn)) == len(drawn) == 180


def test_classes_are_equally_frequent_and_in_no_order(task: DrawnTask):
    _, labels = task.pictures("test", 4 * len(task.class_names) + 3, 0)
    counts = np.bincount(labels, minlength=len(task.class_names))
    assert counts.sum() == len(labels)
    assert counts.max() - counts.min() == 1
    assert not np.array_equal(labels, np.sort(labels))


def test_every_class_looks_different_under_the_same_random_numbers(task: DrawnTask):
    scenes = [task.draw(np.random.default_rng(5), label, "train") for label in range(len(task.class_names))]
    assert len({np.asarray(scene).tobytes() for scene in scenes}) == len(scenes)


def test_every_template_has_a_place_for_the_class_and_the_vague_words_name_none(task: DrawnTask):
    assert all(template.count("{}") == 1 for template in task.templates)
    assert not set(task.subject.split()) & set(task.class_names)


def test_handwriting_of_the_test_split_was_never_trained_on():
    for label in range(10):
        train, test = ({mask.tobytes() for mask in handwriting(label, split)} for split in ("train", "test"))
        assert train and test and not train & test


@pytest.mark.parametrize("name", views.SCENES)
def test_photograph_boxes_lie_inside_and_hold_the_smallest_patch(name: str):
    scene = views.SCENES[name]
    width, height = views.photograph(scene.photograph).size
    for left, top, right, bottom in (*scene.train, *scene.test):
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert min(right - left, bottom - top) >= views.SMALLEST


def test_train_and_test_boxes_of_a_photograph_are_a_margin_apart():
    scenes = views.SCENES.values()
    for one, other in itertools.product(scenes, scenes):
        if one.photograph != other.photograph:
            continue
        for a, b in itertools.product(one.train, other.test):
            gap = max(b[0] - a[2], a[0] - b[2], b[1] - a[3], a[1] - b[3])
            assert gap >= views.MARGIN, (a, b)


def test_windows_reach_every_edge_of_their_box_and_stay_inside():
    box, rng = (10, 20, 40, 60), np.random.default_rng(0)
    left, top, right, bottom = np.array([views.window(rng, box) for _ in range(400)]).T
    assert (left.min(), top.min(), right.max(), bottom.max()) == box
    assert np.array_equal(right - left, bottom - top)


def test_the_camera_dims_blurs_and_adds_grain_of_the_stated_size():
    scene = Image.new("RGB", (CANVAS, CANVAS), (100, 150, 200))
    settings = {"light": (0.5, 0.5), "contrast": (1.0, 1.0), "blur": 0.0, "noise": (5.0, 5.0)}
    photo = photographed(scene, np.random.default_rng(0), **settings).astype(float)
    assert photo.shape == (SIZE, SIZE, 3)
    # Standard error of a channel's mean is 5 / 32; rounding down to whole numbers takes half a level.
    assert photo.mean(axis=(0, 1)) == pytest.approx([49.5, 74.5, 99.5], abs=0.6)
    assert photo.std(axis=(0, 1)) == pytest.approx([5, 5, 5], rel=0.1)


def test_a_placed_mask_lands_where_it_should_at_the_size_it_should_have():
    mask = placed(Image.new("L", (10, 20), 255), (40, 24), 30.0)
    left, top, right, bottom = mask.getbbox()
    assert ((left + right) / 2, (top + bottom) / 2) == pytest.approx((40, 24), abs=0.6)
    assert (right - left, bottom - top) == pytest.approx((15, 30), abs=1)


def test_a_quarter_turn_swaps_height_and_width():
    left, top, right, bottom = placed(Image.new("L", (10, 20), 255), (32, 32), 30.0, angle=90).getbbox()
    assert (right - left, bottom - top) == pytest.approx((30, 15), abs=1)


def test_light_is_brighter_than_dark_by_the_gap():
    rng = np.random.default_rng(0)
    pairs = [dark_and_light(rng, 80) for _ in range(50)]
    assert all(luminance(light) - luminance(dark) >= 80 for dark, light in pairs)
