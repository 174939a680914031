"""Any merge method on plain state dicts, whatever it reads: what its laws are checked with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from driftlens.checkpoints.tensor_sources import InMemorySource
from driftlens.data.samples import SampleSet
from driftlens.engine.pool import ModelPool
from driftlens.experiment.merging import merge_to_files
from driftlens.experiment.study import AnalysisSettings, Study, TaskSamples
from driftlens.experiment.study_loading import OpenModels
from driftlens.merging.method import MergeMethod, StateDict
from driftlens.models.heads import LinearHead
from driftlens.utils.variants import expert_name
from tests.models.live import architecture_of
from tests.zoo import hand_made as tiny
from tests.zoo.hand_made import TinyStack
from tests.zoo.small import scrambled

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
    sources = {"base": InMemorySource("base", base)}
    sources |= {expert_name(task): InMemorySource(task, experts[task]) for task in experts}
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
            task: TaskSamples(diagnosis=samples(task), calibration=samples(task), head=head_of(task)) for task in tasks
        },
        settings=AnalysisSettings("cls", frozenset()),
    )


def apply(
    method: MergeMethod, base: StateDict, experts: Mapping[str, StateDict], **settings: Any
) -> dict[str, Tensor]:
    """What the method makes of a base and experts."""
    settings = FEW.get(method.name, {}) | settings
    if method.reads in ("entry", "tensor"):
        found: dict[str, Tensor] = method.function(base, experts, **method.with_settings(settings).settings)
        return found
    models = open_models(base, experts)
    source = merge_to_files(models, method.with_settings(settings), study_of(models) if method.needs_samples else None)
    return {name: source.read(name) for name in source.headers}


Sides = tuple[Tensors, Tensors]
"""What a law says is the same."""


def expert_order_free(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, dict(reversed(experts.items()))), apply(method, base, experts)


def equal_experts_are_fixed(method: MergeMethod) -> Sides:
    base, experts = states(method)
    one = experts["a"]
    return apply(method, base, dict.fromkeys(experts, one)), one


def zero_scaling_is_base(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, experts, scaling=0.0), base


def affine_in_scaling(method: MergeMethod) -> Sides:
    base, experts = states(method)
    low, middle, high = (apply(method, base, experts, scaling=scaling) for scaling in (0.2, 0.5, 0.8))
    return {name: (low[name] + high[name]) / 2 for name in base}, middle


def one_expert_at_scaling_one(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, {"a": experts["a"]}, scaling=1.0), experts["a"]


def one_expert_is_fixed(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, {"a": experts["a"]}), experts["a"]


def experts_at_base(method: MergeMethod) -> Sides:
    base, experts = states(method)
    return apply(method, base, dict.fromkeys(experts, base)), base


def homogeneous(method: MergeMethod) -> Sides:
    """Task vectors twice as long make a step twice as long."""
    base, experts = states(method)
    longer = {
        task: {name: 2 * expert[name] - start for name, start in base.items()} for task, expert in experts.items()
    }
    merged = apply(method, base, experts)
    return apply(method, base, longer), {name: 2 * merged[name] - start for name, start in base.items()}


def unbiased_over_masks(method: MergeMethod) -> Sides:
    """Of one expert at scaling 1 the mean over seeds is the expert: within 6 standard errors, everywhere."""
    base, experts = states(method)
    one = {"a": experts["a"]}
    drawn = [apply(method, base, one, scaling=1.0, seed=seed) for seed in range(400)]
    beyond = {}
    for name in base:
        merged = torch.stack([each[name] for each in drawn])
        error = merged.std(dim=0) / len(drawn) ** 0.5
        beyond[name] = ((merged.mean(dim=0) - one["a"][name]).abs() > 6 * error).to(base[name])
    return beyond, {name: torch.zeros_like(value) for name, value in base.items()}


LAWS = {
    law.__name__: law
    for law in (
        experts_at_base,
        homogeneous,
        unbiased_over_masks,
        expert_order_free,
        equal_experts_are_fixed,
        zero_scaling_is_base,
        affine_in_scaling,
        one_expert_at_scaling_one,
        one_expert_is_fixed,
    )
}


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        # Whole models are merged in float32.
        tolerance = (1e-12, 1e-14) if wanted[name].dtype == torch.float64 else (1e-5, 1e-6)
        torch.testing.assert_close(found[name], wanted[name], rtol=tolerance[0], atol=tolerance[1])


def stacks() -> tuple[TinyStack, dict[str, TinyStack]]:
    """Base and experts of `states` as modules."""
    models = []
    for seed in range(4):
        models.append(TinyStack().eval())
        models[-1].load_state_dict(random_model(seed))
    return models[0], dict(zip("abc", models[1:], strict=True))


def calibration_images() -> Tensor:
    study = study_of(open_models(random_model(0), {"a": random_model(1)}))
    samples = study.tasks["a"].calibration
    assert samples is not None
    images: Tensor = samples.load(range(len(samples)))
    return images
