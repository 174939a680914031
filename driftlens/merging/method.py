"""Merge methods: their description, and the registry that finds them. Entry points: `MergeMethod`, `merge_called`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import Tensor

from driftlens.utils.errors import SpecError
from driftlens.utils.registry import Registry, resolve, settings_of

StateDict = Mapping[str, Tensor]
"""Tensors of one model by name, in float32; read-only."""

Reads = Literal["entry", "tensor", "site", "model", "moments", "prefix", "samples"]

# Arguments of a merge function by its `reads`. Each gets `base` and `experts` by task, then settings as keyword-only
# arguments (see `driftlens.utils.registry`). Integer tensors are left out.
# - `entry`: some rows of one tensor, under its name; returns the same, merged.
# - `tensor`: one whole parameter; queries, keys and values are separate and matrices are [out, in] however a file
#   stores them. The name is the same in every file format: layer, group of `parameter_groups`, number, as in `2.q.0`;
#   a parameter outside all layers has its key. Returns the same, merged.
# - `site`: one linear module as `weight` [out, in] and, if it has one, `bias` [out], as in `tensor`.
# - `moments`: as `site`, then by task E[x x'] [in, in] in float64 of the module's inputs x in the task's expert.
# - `prefix`: as `moments`, where each expert's layer gets the features after the merged earlier layers.
# - `model`: every parameter, as in `tensor`, read from its file at each access: two loops read all files twice.
#   Yields (name, merged tensor) in any order.
# - `samples`: as `model`, but tensors as stored, by their keys, then the opened study, which holds the calibration
#   samples without labels; gradients are on. Methods with `scores` get them from `study.asked(task)`, see
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
    def reads_sites(self) -> bool:
        """True if linear modules are merged one by one, and all other parameters by the method `others`."""
        return self.reads == "site" or self.reads_moments

    @property
    def reads_moments(self) -> bool:
        """True if the function gets the moments of a linear module's inputs."""
        return self.reads in ("moments", "prefix")

    @property
    def runs_models(self) -> bool:
        """True if calibration samples are needed."""
        return self.reads_moments or self.reads == "samples"

    def with_settings(self, parameters: Mapping[str, object]) -> Merge:
        """Return the method with the given settings merged over the defaults."""
        return Merge(self, resolve(self.function, parameters, f"merge method {self.name!r}"))


class Merge(NamedTuple):
    """A merge method with all its settings."""

    method: MergeMethod
    settings: Mapping[str, Any]

    def require(self, *, has_base: bool, without: Sequence[str]) -> None:
        """Raise an error if the models lack an input of the method.

        Args:
            has_base: True if there is a base model.
            without: tasks without calibration samples.
        """
        method = self.method
        if not has_base and (
            method.needs_base or (method.reads_sites and merge_methods[method.others].needs_base)
        ):
            raise SpecError(
                f"merge method {method.name!r} needs a base",
                hint="Add `base: {weights: FILE}` to the spec, or use `method: average`.",
            )
        if method.runs_models and without:
            raise SpecError(
                f"merge method {method.name!r} needs calibration samples; {', '.join(without)} has none",
                hint=f"Add data.{without[0]}: {{kind: imagefolder, ...}} to the spec; labels are not needed.",
            )

    @property
    def record(self) -> dict[str, Any]:
        """The name and the settings, as a run's record stores them."""
        about = {name: getattr(self.method, name) for name in ("title", "source", "reads")}
        return {"method": self.method.name, **about, "parameters": dict(sorted(self.settings.items()))}

    @property
    def rest(self) -> Merge:
        """The merge of all parameters other than linear modules, for methods that read sites."""
        if self.method.others == self.method.name:
            return self
        others = merge_methods[self.method.others]
        shared = settings_of(others.function).model_fields
        return others.with_settings({name: value for name, value in self.settings.items() if name in shared})


def merge_called(name: str, parameters: Mapping[str, object] = MappingProxyType({})) -> Merge:
    """Return the merge by a registered method.

    Raises:
        SpecError: the method is unknown, or a setting is not allowed.
    """
    return merge_methods[name].with_settings(parameters)


class _MergeMethods(Registry[MergeMethod]):
    def method(
        self, name: str, *, title: str, source: str, laws: set[str], **attributes: Any
    ) -> Callable[[MergeFunction], MergeFunction]:
        """Return a decorator that registers a merge function; arguments are the attributes of `MergeMethod`."""

        def file(function: MergeFunction) -> MergeFunction:
            entry = MergeMethod(name, title, source, frozenset(laws), function, **attributes)
            # Called for its errors: a faulty annotation fails on import, not when a user selects the method.
            settings_of(function)
            self.register(name)(entry)
            return function

        return file


merge_methods = _MergeMethods("merge method", "driftlens.merging", "driftlens.merge_methods")
