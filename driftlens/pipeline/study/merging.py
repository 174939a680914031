"""Merging checkpoints: tensor by tensor in float32, saved the way the base is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from driftlens.errors import SpecError
from driftlens.files import PathLike
from driftlens.merging.method import MergeMethod, merge_methods
from driftlens.models.export import save_model
from driftlens.models.sources import StateSource, TensorHeader, check_finite
from driftlens.pipeline.study.opening import OpenModels
from driftlens.variants import expert_of


class MergedSource:
    """A merge of checkpoints, computed tensor by tensor whenever one is read.

    Arithmetic is in float32 whatever the dtypes of the files, and the result is in the base's dtype: a sum of twenty
    half-precision task vectors would lose visible precision.

    Args:
        method: an elementwise merge method.
        base: start of the task vectors; for methods without one, any of the experts.
        experts: by task.
        parameters: of the method, all resolved.
    """

    def __init__(
        self,
        method: MergeMethod,
        base: StateSource,
        experts: Mapping[str, StateSource],
        parameters: Mapping[str, object],
    ) -> None:
        if not method.elementwise:
            raise SpecError(f"merge method {method.name!r} can't merge tensor by tensor")
        self.name = f"{method.title} of {', '.join(sorted(experts))}"
        self._method = method
        self._base = base
        self._experts = dict(sorted(experts.items()))
        self._parameters = dict(parameters)

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Those of the base."""
        return self._base.headers

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The merged tensor; tensors that are not floating point are the base's.

        Raises:
            NumericsError: the base's tensor or an expert's is NaN or infinite; names the file.
        """
        start = self._base.read(key, rows)
        if not start.is_floating_point():
            return start
        experts = {task: {key: source.read(key, rows).float()} for task, source in self._experts.items()}
        # Checked before they are summed: afterwards nobody could tell whose NaN it was.
        check_finite(self._base.name, key, start)
        for task, tensors in experts.items():
            check_finite(self._experts[task].name, key, tensors[key])
        merged = self._method.function({key: start.float()}, experts, **self._parameters)
        return merged[key].to(start.dtype)


def merged_source(models: OpenModels, method: str, parameters: Mapping[str, object]) -> MergedSource:
    """The experts of a spec, merged.

    Raises:
        SpecError: no such method, a parameter it doesn't have, or it needs a base and there is none.
    """
    entry = merge_methods[method]
    experts = {
        name.removeprefix("expert:"): source
        for name, source in models.sources.items()
        if name.startswith("expert:")
    }
    if entry.needs_base and "base" not in models.sources:
        raise SpecError(
            f"merge method {method!r} needs a base", hint="Add `base: {weights: FILE}` to the spec."
        )
    start = models.sources.get("base", next(iter(experts.values())))
    return MergedSource(entry, start, experts, entry.resolve(parameters))


@torch.no_grad()
def save_merge(models: OpenModels, method: str, parameters: Mapping[str, object], path: PathLike) -> None:
    """Merge and write the result in the format of the base.

    Raises:
        SpecError: as for `merged_source`, or the base can't be saved in this form.
        RunError: the path can't be written to.
    """
    source = merged_source(models, method, parameters)
    shape = models.base if models.base is not None else models.sources[expert_of(_first_task(models))]
    resolved = merge_methods[method].resolve(parameters)
    described = ", ".join(f"{name}={value}" for name, value in sorted(resolved.items()))
    save_model(
        models.architecture,
        shape,
        source,
        path,
        metadata={"merge_method": method, "merge_parameters": described},
    )


def _first_task(models: OpenModels) -> str:
    return min(name.removeprefix("expert:") for name in models.sources if name.startswith("expert:"))
