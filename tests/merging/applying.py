"""Any merge method on plain state dicts, whatever it reads: what its laws are checked with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftlens.base.variants import expert_of
from driftlens.checkpoints.sources import TensorsSource
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import ModelPool
from driftlens.jobs.study.merging import merged_source
from driftlens.jobs.study.opening import OpenModels
from driftlens.jobs.study.study import Settings, Study, TaskSamples
from driftlens.merging.method import MergeMethod, StateDict
from driftlens.models.architecture import architecture_of
from driftlens.models.chain import LinearHead
from driftlens.models.families.vit import scrambled
from tests import tiny
from tests.tiny import TinyStack

Tensors = dict[str, Tensor]
FEW: dict[str, dict[str, Any]] = {"adamerging": {"steps": 3, "batch_size": 4}, "wudi": {"steps": 20}}
"""Settings with which methods that take long don't."""


def random_state(seed: int) -> Tensors:
    """A few tensors in float64, for methods that are plain functions of tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "linear.weight": torch.randn(6, 12, generator=generator, dtype=torch.float64),
        "norm.weight": torch.randn(12, generator=generator, dtype=torch.float64),
    }


def random_model(seed: int) -> Tensors:
    """The weights of a whole tiny model in float32, for methods that want to know what is a module of it."""
    return {name: value.detach() for name, value in scrambled(TinyStack, seed).state_dict().items()}


def states(method: MergeMethod) -> tuple[Tensors, dict[str, Tensors]]:
    """A base and three experts, or two where the method takes no more, of the kind that it can merge here."""
    draw = random_state if method.reads in ("entry", "tensor") else random_model
    tasks = "ab" if method.name == "slerp" else "abc"
    return draw(0), {task: draw(seed) for seed, task in enumerate(tasks, start=1)}


def open_models(base: StateDict, experts: Mapping[str, StateDict]) -> OpenModels:
    """The tiny model's weights as if they had been opened from files."""
    sources = {"base": TensorsSource("base", base)}
    sources |= {expert_of(task): TensorsSource(task, experts[task]) for task in experts}
    architecture = architecture_of(TinyStack().eval(), torch.zeros(1, 3, 16, 16))
    return OpenModels(architecture, sources, sources, {})


def head_of(task: str) -> LinearHead:
    """A random classifier of three classes."""
    generator = torch.Generator().manual_seed(ord(task[0]))
    return LinearHead(("x", "y", "z"), torch.randn(3, tiny.STACK_WIDTH, generator=generator))


def study_of(models: OpenModels, *, count: int = 6) -> Study:
    """The same with a few random calibration images of every task."""
    images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(9))
    ids = tuple(map(str, range(count)))

    def samples(task: str) -> SampleSet:
        return SampleSet(task, "calibration", ids, ids, lambda rows: images[list(rows)], batch_size=4)

    tasks = sorted(name.removeprefix("expert:") for name in models.sources if name != "base")
    architecture = models.architecture
    pool = ModelPool(
        architecture.chain,
        architecture.skeleton,
        models.sources,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return Study(
        name="tiny",
        pool=pool,
        variants=("base",),
        tasks={
            task: TaskSamples(diagnosis=samples(task), calibration=samples(task), head=head_of(task))
            for task in tasks
        },
        settings=Settings("cls", frozenset()),
    )


def apply(
    method: MergeMethod, base: StateDict, experts: Mapping[str, StateDict], **settings: Any
) -> dict[str, Tensor]:
    """What the method makes of a base and experts."""
    settings = FEW.get(method.name, {}) | settings
    if method.reads in ("entry", "tensor"):
        found: dict[str, Tensor] = method.function(base, experts, **method.resolve(settings))
        return found
    models = open_models(base, experts)
    source = merged_source(models, method.name, settings, study_of(models) if method.runs_models else None)
    return {name: source.read(name) for name in source.headers}
