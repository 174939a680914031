from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from driftlens.base.errors import Cancelled, SpecError
from driftlens.base.progress import CancelToken, ProgressEvent, Reporter
from driftlens.suites import cache as caches
from driftlens.suites.cache import RECORD, Suite
from driftlens.suites.embedded import BASE, CONFIG, embedded_suite
from driftlens.suites.recipe import AnyRecipe, Schedule
from driftlens.suites.training import accuracy, build_clip, class_embeddings, tokenizer
from tests.suites.conftest import TINY, TINY_TEXT, alone

Damage = Callable[[Path], object]


@pytest.fixture
def copy(suite: Suite, tmp_path: Path) -> Suite:
    folder = tmp_path / suite.folder.name
    shutil.copytree(suite.folder, folder)
    return replace(suite, folder=folder)


def test_the_spec_is_one_that_a_run_accepts_and_names_files_that_exist(suite: Suite):
    from driftlens.spec import load_spec

    spec = load_spec(suite.spec())
    assert spec.tasks == suite.tasks and len(suite.tasks) == 8
    weights = [spec.base.weights, *(expert.weights for expert in spec.experts.values())]
    files = [spec.architecture.source, *weights, *(entry.file for entry in spec.data.tasks.values())]
    assert len(set(files)) == 18
    assert all(Path(file).is_absolute() and Path(file).is_file() for file in files)


def test_open_clip_loads_the_base_by_itself(suite: Suite):
    import json

    from open_clip.model import CLIP

    clip = CLIP(**json.loads((suite.folder / CONFIG).read_text())["model_cfg"])
    clip.load_state_dict(load_file(suite.folder / BASE), strict=True)
    assert clip.logit_scale.exp().item() == pytest.approx(suite.record()["logit_scale"])


def test_experts_hold_the_whole_image_tower_and_nothing_else(suite: Suite):
    base = load_file(suite.folder / BASE)
    tower = {key: tensor.shape for key, tensor in base.items() if key.startswith("visual.")}
    for entry in suite.spec()["experts"].values():
        expert = load_file(entry["weights"])
        assert {key: tensor.shape for key, tensor in expert.items()} == tower
        assert any(not torch.equal(tensor, base[key]) for key, tensor in expert.items())


@pytest.mark.slow
def test_measured_accuracies_are_those_of_the_files(suite: Suite):
    from driftlens.suites.drawing import tasks
    from driftlens.suites.training import Pictures

    clip = build_clip(TINY.model_config(), 99)
    clip.load_state_dict(load_file(suite.folder / BASE))
    measured = suite.record()["test_accuracy"]
    for name, entry in suite.spec()["experts"].items():
        head = class_embeddings(clip, tokenizer(TINY.context_length), tasks[name])
        with np.load(suite.spec()["data"][name]["file"]) as file:
            pixels = Pictures(tasks[name], file["x_test"], file["y_test"]).pixels()
            labels = torch.from_numpy(file["y_test"])
        tower = build_clip(TINY.model_config(), 99).visual
        expert = {key.removeprefix("visual."): value for key, value in load_file(entry["weights"]).items()}
        tower.load_state_dict(expert)
        assert accuracy(clip.visual, pixels, labels, head) == measured[name]["base"]
        assert accuracy(tower, pixels, labels, head) == measured[name]["expert"]
        assert F.cosine_similarity(tower(pixels), clip.visual(pixels)).max() < 1 - 1e-6


def test_saved_pictures_are_the_drawn_ones_and_need_no_pickle(suite: Suite):
    from driftlens.suites.drawing import tasks

    task = tasks["letters"]
    with np.load(suite.spec()["data"]["letters"]["file"], allow_pickle=False) as file:
        assert set(file) == {"x_train", "y_train", "x_test", "y_test", "class_names"}
        for purpose, count in (("train", TINY.num_train), ("test", TINY.num_test)):
            images, labels = task.pictures(purpose, count, 0)
            assert np.array_equal(file[f"x_{purpose}"], images)
            assert np.array_equal(file[f"y_{purpose}"], labels)
        assert tuple(file["class_names"]) == task.class_names


def test_a_whole_suite_is_opened_and_not_built_again(
    suite: Suite, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "driftlens.suites.embedded.ImageSuite.build", lambda *_, **__: pytest.fail("built again")
    )
    assert embedded_suite(cache=cache, recipe=TINY) == suite


DAMAGES: dict[str, Damage] = {
    "no record": lambda folder: (folder / RECORD).unlink(),
    "half a record": lambda folder: (folder / RECORD).write_text((folder / RECORD).read_text()[:200]),
    "a record that is a list": lambda folder: (folder / RECORD).write_text("[]"),
    "no expert": lambda folder: (folder / "experts" / "signs.safetensors").unlink(),
    "half a base": lambda folder: (folder / BASE).write_bytes((folder / BASE).read_bytes()[:1000]),
    "one bit of a data file": lambda folder: _flip(folder / "data" / "digits.npz"),
    "nothing": lambda folder: shutil.rmtree(folder),
}


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_noticed(copy: Suite, damage: Damage):
    assert copy.is_whole()
    damage(copy.folder)
    assert not copy.is_whole()


def test_a_suite_of_another_recipe_is_not_taken_for_this_one(suite: Suite):
    assert not replace(suite, digest=TINY.digest(1)).is_whole()


@pytest.mark.slow
def test_a_half_written_suite_is_built_again_and_comes_out_the_same(suite: Suite, copy: Suite):
    (copy.folder / RECORD).unlink()
    (copy.folder / "left over").touch()
    with alone():
        again = embedded_suite(cache=copy.folder.parent, recipe=TINY)
    assert again == copy
    assert again.record()["files"] == suite.record()["files"]
    assert {path.name for path in again.folder.parent.iterdir()} <= {
        again.folder.name,
        f"{again.folder.name}.lock",
    }


@pytest.mark.slow
@pytest.mark.every
def test_rebuilding_replaces_a_suite_that_is_whole_and_counts_every_phase_to_its_end(copy: Suite):
    before, events = (copy.folder / RECORD).stat().st_ino, list[ProgressEvent]()
    embedded_suite(cache=copy.folder.parent, recipe=TINY, rebuild=True, reporter=Reporter(events.append))
    assert (copy.folder / RECORD).stat().st_ino != before
    assert copy.is_whole()
    last = {event.phase: event for event in events}
    assert list(last) == ["draw", "train base", "train experts"]
    assert all(event.done == event.total for event in last.values())
    done = [event.done for event in events if event.phase == "train experts"]
    assert done == sorted(done) and done[0] == 0
    assert [event.label for event in events if event.phase == "train experts"][-1].endswith("(8 of 8 done)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "workers"),
    [
        ("draw", alone),
        ("train base", alone),
        pytest.param("train base", nullcontext, marks=pytest.mark.every),
        ("train experts", alone),
    ],
)
def test_cancelling_leaves_nothing_half_built(
    phase: str, workers: Callable[[], AbstractContextManager[None]], tmp_path: Path
):
    token = CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == phase and event.done:
            token.cancel()

    with workers(), pytest.raises(Cancelled):
        embedded_suite(cache=tmp_path, recipe=TINY, reporter=Reporter(stop, token))
    assert all(path.suffix == ".lock" for path in tmp_path.iterdir())


def test_a_second_process_waits_and_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "_POLL_SECONDS", 0.01)
    token, phases = CancelToken(), []

    def stop(event: ProgressEvent) -> None:
        phases.append(event.phase)
        token.cancel()

    name = f"embedded-{TINY.digest(0)[:12]}.lock"
    with filelock.FileLock(tmp_path / name), pytest.raises(Cancelled):
        embedded_suite(cache=tmp_path, recipe=TINY, reporter=Reporter(stop, token))
    assert phases == ["wait"]


def test_a_negative_seed_is_refused(tmp_path: Path):
    with pytest.raises(SpecError, match="-1"):
        embedded_suite(seed=-1, cache=tmp_path, recipe=TINY)


@pytest.mark.parametrize(
    ("tiny", "name"),
    [(tiny, field.name) for tiny in (TINY, TINY_TEXT) for field in fields(tiny)],
)
def test_every_setting_changes_the_digest(tiny: AnyRecipe, name: str):
    value = getattr(tiny, name)
    changed = replace(value, steps=value.steps + 1) if isinstance(value, Schedule) else value * 2
    assert replace(tiny, **{name: changed}).digest(0) != tiny.digest(0)


def test_the_seed_changes_the_digest_and_equal_recipes_share_one():
    assert TINY.digest(0) != TINY.digest(1)
    assert replace(TINY).digest(0) == TINY.digest(0)
