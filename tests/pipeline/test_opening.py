"""Heads of all tasks: one text tower for all of them, and none where nobody asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from driftlens.base.errors import SpecError
from driftlens.checkpoints.sources import StateSource, TensorsSource
from driftlens.jobs.study.opening import OpenModels, open_heads
from driftlens.models.architecture import Architecture
from driftlens.models.heads import TextTower, file_head, text_head
from driftlens.spec import RunSpec, load_spec
from tests.zoo.world import CLASSES, LOGIT_SCALE, TASKS, World

BASE = TensorsSource("base", {"w": torch.ones(1)})
FIRST, SECOND = TASKS


def embed(prompts: Sequence[str]) -> Tensor:
    """How often each letter occurs, so that every name and template counts."""
    return torch.tensor([[float(prompt.count(letter)) for letter in "abcdeilorst"] for prompt in prompts])


TOWER = TextTower(embed, 7.0)


@dataclass
class Towers:
    """Stands for an architecture, and counts how often its text tower is opened."""

    opened: int = 0

    def classifier_keys(self, stored: StateSource) -> None:
        return None

    def text_tower(self, base: StateSource) -> TextTower:
        assert base is BASE
        self.opened += 1
        return TOWER


def models(towers: Towers, base: StateSource | None = BASE) -> OpenModels:
    stored = {} if base is None else {"base": base}
    return OpenModels(cast("Architecture", towers), stored, {}, {})


def spec_with(world: World, **heads: Any) -> RunSpec:
    return load_spec(world.spec(heads=heads))


def prompts(task: str, *templates: str) -> dict[str, Any]:
    return {"classes": list(CLASSES[task]), "templates": list(templates)}


def test_the_text_tower_is_opened_once_for_all_tasks(world: World) -> None:
    towers, templates = Towers(), {FIRST: ("a {}", "the {}"), SECOND: ("{} here",)}
    heads = {task: prompts(task, *given) for task, given in templates.items()}
    found = open_heads(spec_with(world, **heads), models(towers), {})
    assert towers.opened == 1
    for task, given in templates.items():
        alone = text_head(TOWER, CLASSES[task], given)
        assert torch.equal(found[task].embeddings, alone.embeddings)
        assert (found[task].classes, found[task].logit_scale) == (CLASSES[task], 7.0)


@pytest.mark.parametrize("base", [BASE, None], ids=["with base", "without base"])
def test_no_text_tower_is_opened_where_every_head_is_a_file(world: World, base: StateSource | None) -> None:
    towers, named = Towers(), {task: CLASSES[task] for task in TASKS}
    spec = spec_with(world, **{task: world.head(task) for task in TASKS})
    found = open_heads(spec, models(towers, base), named)
    assert towers.opened == 0
    for task in TASKS:
        stored = file_head(world.folder / "heads.safetensors", task, LOGIT_SCALE, CLASSES[task])
        assert torch.equal(found[task].embeddings, stored.embeddings)
        assert found[task].classes == CLASSES[task]


def test_files_and_prompts_may_stand_side_by_side(world: World) -> None:
    towers = Towers()
    spec = spec_with(world, **{FIRST: world.head(FIRST), SECOND: prompts(SECOND, "{}")})
    found = open_heads(spec, models(towers), {FIRST: CLASSES[FIRST]})
    assert towers.opened == 1
    assert [found[task].logit_scale for task in TASKS] == [LOGIT_SCALE, 7.0]


def test_prompts_without_a_base_are_refused_by_task(world: World) -> None:
    spec = spec_with(world, **{FIRST: world.head(FIRST), SECOND: prompts(SECOND, "{}")})
    with pytest.raises(SpecError, match=rf"heads\.{SECOND}: templates .* there is no base") as refused:
        open_heads(spec, models(Towers(), None), {FIRST: CLASSES[FIRST]})
    assert "precomputed embeddings" in refused.value.hint


def test_classes_that_nobody_names_are_refused_by_task(world: World) -> None:
    spec = spec_with(world, **{FIRST: world.head(FIRST)})
    with pytest.raises(SpecError, match=rf"heads\.{FIRST}: no class names"):
        open_heads(spec, models(Towers()), {FIRST: None})
