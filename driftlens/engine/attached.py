"""Corrections of the final feature, one per task, and their tensors in files.

A correction is part of the last layer: e = m + p, p = A e and the split of the final drift hold with it as without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from driftlens.base.errors import IncompatibleModelsError
from driftlens.models.chain import LayerChain
from driftlens.models.frames import features_of


class Attachment(Protocol):
    """A pure, differentiable map of the final feature of one variant, for one task."""

    def __call__(self, stream: Tensor) -> Tensor:
        """Return corrected features of the same shape, [n, t, d] or [n, d]."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all numbers that make up the map, by name: what is saved of it.

        An attribute `code` may hold Python that computes `f` anew from `f` and from these tensors, `t`, for others to
        read.
        """
        ...


Attachments = Mapping[str, Attachment]
"""Task -> its correction of the final feature."""


def attachment_tensors(attachments: Attachments, last: int) -> dict[str, Tensor]:
    """Return all tensors by their names in files, `last/tensor/task`; `last` is the index of the last layer."""
    return {
        f"{last}/{name}/{task}": value.detach()
        for task, attachment in sorted(attachments.items())
        for name, value in attachment.tensors().items()
    }


def attachments_from(
    tensors: Iterable[tuple[str, Tensor]], make: Callable[[Mapping[str, Tensor]], Attachment]
) -> dict[str, Attachment]:
    """Build the corrections from what `attachment_tensors` returned; `make` takes the tensors of one task."""
    by_task: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, value in tensors:
        _, name, task = key.split("/", 2)
        by_task[task][name] = value
    return {task: make(of_task) for task, of_task in by_task.items()}


def portable_tensors(chain: LayerChain, attachments: Attachments, prefix: str = "") -> dict[str, Tensor]:
    """Return all tensors as `module/tensor/task`, by the path of the module whose output is the final feature.

    `prefix` is what the path begins with where the library's whole model holds the module.
    """
    path = f"{prefix}{final_module(chain)}".rstrip(".") if attachments else ""
    return {
        f"{path}/{name}/{task}": value.detach()
        for task, attachment in attachments.items()
        for name, value in attachment.tensors().items()
    }


def final_module(chain: LayerChain) -> str:
    """Return the path of the library's module whose output is the final feature; raise where there is none."""
    last = chain.layers[-1]
    path = last.path if last.role == "block" else chain.final
    if path is None:
        raise IncompatibleModelsError(
            f"what leaves the {last.role} is no module's output in {chain.architecture}, so nothing can be "
            "attached to the library's own model there",
            hint="Choose a method that changes weights.",
        )
    return path


def behind(path: str, attachment: Attachment) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook of the module at a path that applies the map to its features."""

    def change(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        changed = attachment(features_of(path, output))
        return changed if isinstance(output, Tensor) else type(output)([changed, *output[1:]])

    return change
