"""Merge methods: description, registry, and those by means, sums and interpolation. Entry point: `merge_by_name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Bounds, Registry, resolve_settings, settings_model

StateDict = Mapping[str, Tensor]
"""Tensors of one model by name, in float32; read-only."""

Reads = Literal["entry", "tensor", "site", "model", "moments", "prefix", "samples"]

# Arguments of a merge function by its `reads`. Each gets `base` and `experts` by task, then settings as keyword-only
# arguments (see `driftlens.utils.registry`). Integer tensors are left out.
# - `entry`: some rows of one tensor, under its name; returns the same, merged.
# - `tensor`: one whole parameter; queries, keys and values are separate and matrices are [out, in] however a file
#   stores them. The name is the same in every file format: layer, group of `parameter_roles`, number, as in `2.q.0`;
#   a parameter outside all layers has its key. Returns the same, merged.
# - `site`: one linear module as `weight` [out, in] and, if it has one, `bias` [out], as in `tensor`.
# - `moments`: as `site`, then by task E[x x'] [in, in] in float64 of the module's inputs x in the task's expert.
# - `prefix`: as `moments`, where each expert's layer gets the features after the merged earlier layers.
# - `model`: every parameter, as in `tensor`, read from its file at each access: two loops read all files twice.
#   Yields (name, merged tensor) in any order.
# - `samples`: as `model`, but tensors as stored, by their keys, then the opened study, which holds the calibration
#   samples without labels; gradients are on. Methods with `scores` get them from `study.scored_samples(task)`, see
#   `driftlens.engine.pool.ScoredSamples`.
READS: Mapping[Reads, str] = {
    "entry": "each entry separately",
    "tensor": "one parameter at a time",
    "site": "one linear module at a time",
    "model": "all parameters of all models",
    "moments": "one linear module at a time, with moments of its inputs on calibration samples",
    "prefix": "one linear module at a time, with moments of its inputs after the merged earlier layers",
    "samples": "all models, and calibration samples without labels",
}

MergeFunction = Callable[..., Any]


@dataclass(frozen=True)
class MergeMethod:
    """A merge function and its description.

    Attributes:
        name: its name in the spec.
        title: its name in reports.
        source: the paper.
        laws: properties that hold for all inputs; the contract tests check each law of each method.
        function: the computation; its keyword-only parameters are the method's settings.
        reads: arguments of the function, see `READS`.
        needs_base: True if the result depends on the base; otherwise the base may be any model.
        others: the `entry` method for all but linear modules, for methods that read sites; it gets the settings that
            it shares. If it is the method itself, it gets one tensor at a time under its key, with empty moments.
        scores: True if every task's score map is needed, where `reads` is `samples`.
        held: experts -> number of whole float32 models that the function keeps in memory.
        runs: (settings, samples of a task, their classes) -> forward and backward passes of one sample per task,
            where `reads` is `samples`; raises a SpecError if the number is unreasonable.
    """

    name: str
    title: str
    source: str
    laws: frozenset[str]
    function: MergeFunction
    reads: Reads = "entry"
    needs_base: bool = True
    others: str = "average"
    scores: bool = False
    held: Callable[[int], int] = lambda experts: 0
    runs: Callable[[Mapping[str, Any], int, int], int] = lambda settings, samples, classes: samples

    @property
    def is_per_module(self) -> bool:
        """True if linear modules are merged one by one, and all other parameters by the method `others`."""
        return self.reads == "site" or self.needs_moments

    @property
    def needs_moments(self) -> bool:
        """True if the merge function needs moments of the inputs of linear modules."""
        return self.reads in ("moments", "prefix")

    @property
    def needs_samples(self) -> bool:
        """True if the merge needs calibration samples."""
        return self.needs_moments or self.reads == "samples"

    def with_settings(self, parameters: Mapping[str, object]) -> MergeConfig:
        """Return the method with the given settings merged over the defaults."""
        return MergeConfig(self, resolve_settings(self.function, parameters, f"merge method {self.name!r}"))


class MergeConfig(NamedTuple):
    """A merge method with values of all its settings."""

    method: MergeMethod
    settings: Mapping[str, Any]

    def require_inputs(self, *, has_base: bool, without: Sequence[str]) -> None:
        """Raise a `SpecError` if the method needs a base or calibration samples that are missing."""
        method = self.method
        if not has_base and (method.needs_base or (method.is_per_module and merge_methods[method.others].needs_base)):
            raise SpecError(
                f"merge method {method.name!r} needs a base",
                hint="Add `base: {weights: FILE}` to the spec, or use `method: average`.",
            )
        if method.needs_samples and without:
            raise SpecError(
                f"merge method {method.name!r} needs calibration samples; {', '.join(without)} has none",
                hint=f"Add data.{without[0]}: {{kind: imagefolder, ...}} to the spec; labels are not needed.",
            )

    @property
    def record(self) -> dict[str, Any]:
        """The name and the settings of the merge, as stored in the record of a run."""
        about = {name: getattr(self.method, name) for name in ("title", "source", "reads")}
        return {"method": self.method.name, **about, "parameters": dict(sorted(self.settings.items()))}

    @property
    def rest(self) -> MergeConfig:
        """The merge of all parameters outside linear modules, for methods that merge modules one by one."""
        if self.method.others == self.method.name:
            return self
        others = merge_methods[self.method.others]
        shared = settings_model(others.function).model_fields
        return others.with_settings({name: value for name, value in self.settings.items() if name in shared})


def merge_by_name(name: str, parameters: Mapping[str, object] = MappingProxyType({})) -> MergeConfig:
    """Return a registered merge method with settings; raise a `SpecError` if either is unknown."""
    return merge_methods[name].with_settings(parameters)


class _MergeMethods(Registry[MergeMethod]):
    """The registry of merge methods."""

    def method(
        self, name: str, *, title: str, source: str, laws: set[str], **attributes: Any
    ) -> Callable[[MergeFunction], MergeFunction]:
        """Return a decorator that registers a merge function; arguments are attributes of `MergeMethod`."""

        def _register_function(function: MergeFunction) -> MergeFunction:
            entry = MergeMethod(name, title, source, frozenset(laws), function, **attributes)
            # Called for its errors: a faulty annotation fails on import, not when a user selects the method.
            settings_model(function)
            self.register(name)(entry)
            return function

        return _register_function


merge_methods = _MergeMethods("merge method", "driftlens.merging", "driftlens.merge_methods")

StepScaling = Annotated[float, Bounds(-100, 100), "factor on the merged step"]
SumScaling = Annotated[float, Bounds(-100, 100), "factor on the sum of task vectors"]
# Largest number of steps of a descent: a mistyped one is refused instead of run for days.
MOST_STEPS = 1_000_000
# Name of a linear module's matrix; no other tensor has this name.
MATRIX = "weight"
# Above this cosine SLERP takes a straight line, as is usual: the angle's sine is too small to divide by.
PARALLEL = 0.9995


def _task_vectors(base: StateDict, experts: Mapping[str, StateDict], name: str) -> list[Tensor]:
    start = base[name]
    return [expert[name] - start for expert in experts.values()]


def add_scaled_step(
    base: StateDict,
    experts: Mapping[str, StateDict],
    scaling: float,
    of_matrices: Callable[[list[Tensor]], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return base + scaling * step: the mean task vector, or `of_matrices(task vectors)` for a matrix.

    Args:
        base: the base's tensors.
        experts: the experts' tensors by task.
        scaling: factor of the step.
        of_matrices: combines the task vectors of one matrix.
    """
    merged = {}
    for name, start in base.items():
        vectors = _task_vectors(base, experts, name)
        if of_matrices is not None and name == MATRIX and start.dim() == 2:
            step = of_matrices(vectors)
        else:
            step = torch.stack(vectors).mean(dim=0)
        merged[name] = start + scaling * step.to(start)
    return merged


@merge_methods.method(
    "average",
    title="Simple Averaging",
    source="arXiv:2203.05482",
    laws={"expert_order_free", "equal_experts_are_fixed"},
    needs_base=False,
)
def average_experts(base: StateDict, experts: Mapping[str, StateDict]) -> dict[str, Tensor]:
    """Average the experts' parameters."""
    return {
        name: sum((expert[name] for expert in experts.values()), start=0 * base[name]) / len(experts) for name in base
    }


@merge_methods.method(
    "task_arithmetic",
    title="Task Arithmetic",
    source="arXiv:2212.04089",
    laws={
        "expert_order_free",
        "zero_scaling_is_base",
        "affine_in_scaling",
        "one_expert_at_scaling_one",
        "homogeneous",
    },
)
def _merge_task_arithmetic(
    base: StateDict, experts: Mapping[str, StateDict], *, scaling: SumScaling = 0.3
) -> dict[str, Tensor]:
    """Return base + scaling * sum over tasks of (expert - base)."""
    return {
        name: start + scaling * sum((expert[name] - start for expert in experts.values()), start=0 * start)
        for name, start in base.items()
    }


@merge_methods.method(
    "model_stock",
    title="Model Stock",
    source="arXiv:2403.19522",
    laws={
        "expert_order_free",
        "equal_experts_are_fixed",
        "one_expert_is_fixed",
        "homogeneous",
        "experts_at_base",
    },
    reads="tensor",
)
def _merge_model_stock(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    filter_wise: Annotated[bool, "one ratio per row, not per tensor"] = False,
) -> dict[str, Tensor]:
    """Return base + t * the mean task vector, t = n c / (1 + (n - 1) c), with the cosine c between task vectors.

    The paper has one angle between n experts; c is the mean over pairs, as in mergekit.
    """
    return {
        name: start + _model_stock_step(_task_vectors(base, experts, name), filter_wise)
        for name, start in base.items()
    }


def _model_stock_step(vectors: list[Tensor], filter_wise: bool) -> Tensor:
    count, example = len(vectors), vectors[0]
    if count == 1:
        return example
    rows = torch.stack(vectors).double()
    rows = rows.reshape(count, *((-1, example.shape[-1]) if filter_wise and example.dim() > 1 else (1, -1)))
    # A zero vector has no direction; its unit vector becomes 0, which is orthogonal to all others.
    units = rows / rows.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    # All ordered pairs, less each vector with itself.
    pairs = units.sum(dim=0).square().sum(dim=-1) - units.square().sum(dim=(0, -1))
    cosine = pairs / (count * (count - 1))
    below = 1 + (count - 1) * cosine
    # Where task vectors cancel there is no step, whatever its length.
    ratio = torch.where(below > 1e-12, count * cosine / below, 0.0)
    return (ratio[:, None] * rows.mean(dim=0)).view_as(example).to(example)


@merge_methods.method(
    "slerp",
    title="SLERP",
    source="doi:10.1145/325334.325242",
    laws={"expert_order_free", "equal_experts_are_fixed", "experts_at_base"},
    reads="tensor",
    needs_base=False,
)
def _merge_slerp(
    base: StateDict,
    experts: Mapping[str, StateDict],
    *,
    t: Annotated[float, Bounds(0, 1), "0 is the first expert by task name, 1 the second"] = 0.5,
) -> dict[str, Tensor]:
    """Interpolate two experts tensor by tensor on the great circle between them (SLERP)."""
    if len(experts) != 2:
        raise SpecError(
            f"merge method 'slerp' needs exactly 2 experts, found {len(experts)}",
            hint="Keep two experts in the spec, or use `average`.",
        )
    start, end = experts.values()
    return {name: _spherical_interpolation(start[name], end[name], t) for name in base}


def _spherical_interpolation(start: Tensor, end: Tensor, t: float) -> Tensor:
    """Return (sin((1-t) a) start + sin(t a) end) / sin(a), with the angle a between the two vectors."""
    a, b = start.double().flatten(), end.double().flatten()
    # A zero tensor has no direction; its cosine becomes 0, so that the result stays finite.
    cosine = a @ b / (a.norm() * b.norm()).clamp(min=torch.finfo(a.dtype).tiny)
    if abs(cosine) > PARALLEL:
        return (1 - t) * start + t * end
    angle = cosine.arccos()
    parts = [(share * angle).sin() / angle.sin() for share in (1 - t, t)]
    return (parts[0] * start + parts[1] * end).to(start)
