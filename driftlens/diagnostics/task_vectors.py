"""Alignment of a variant's task vector with an expert's: cosine, norm ratio, sign agreement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import GROUPS, parameter_groups
from driftlens.models.chain import Layer, LayerChain, Slot
from driftlens.runs.schema import PARAMS
from driftlens.utils.diagnostic import diagnostic
from driftlens.utils.variants import expert_of

# Entries that are widened to float64 at a time, 32 MiB: the embeddings of a vocabulary are large.
_PIECE = 2**22


@dataclass(frozen=True)
class Alignment:
    """Sums over the entries of two task vectors; they add, so a layer is the sum of its modules.

    `agreeing` counts entries in which both are non-zero and of one sign, `moved` those in which both are non-zero.
    """

    dot: float = 0.0
    variant_energy: float = 0.0
    expert_energy: float = 0.0
    agreeing: int = 0
    moved: int = 0

    @classmethod
    def between(cls, variant: Tensor, expert: Tensor) -> Alignment:
        """Compute the sums of one pair of task vectors of equal shape, accumulated in float64."""
        left, right = variant.double().flatten(), expert.double().flatten()
        product = left * right
        return cls(
            dot=float(product.sum()),
            variant_energy=float(left.square().sum()),
            expert_energy=float(right.square().sum()),
            agreeing=int((product > 0).sum()),
            moved=int((product != 0).sum()),
        )

    def __add__(self, other: Alignment) -> Alignment:
        return Alignment(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def values(self) -> dict[str, float | None]:
        """Return `cos`, `norm_ratio` (variant over expert) and `sign_agreement`; None if one vector is zero."""
        both = self.variant_energy > 0 and self.expert_energy > 0
        return {
            "cos": self.dot / (self.variant_energy * self.expert_energy) ** 0.5 if both else None,
            "norm_ratio": (self.variant_energy / self.expert_energy) ** 0.5
            if self.expert_energy > 0
            else None,
            "sign_agreement": self.agreeing / self.moved if self.moved else None,
        }


def task_vector_cosine(variant: Tensor, expert: Tensor) -> float | None:
    """Compute the cosine between two task vectors (weights minus base weights) of equal shape; None if one is zero."""
    return Alignment.between(variant, expert).values()["cos"]


@diagnostic(
    "task_vectors", table="params", columns=PARAMS.columns[len(PARAMS.key) :], needs="weights", option=""
)
def alignment_rows(pool: ModelPool, task: str, variant: str) -> Iterator[dict[str, object]]:
    """Yield how a variant's task vector aligns with the expert's: by module, layer, group and backbone (`params` rows).

    A parameter counts once, in the first layer that lists it. A head outside all layers, as in language models, is a
    group and not part of the backbone.

    Args:
        pool: the models.
        task: the task of the expert.
        variant: the model that is compared.
    """
    chain = pool.chain
    backbone, groups = Alignment(), {name: Alignment() for name in GROUPS}
    for layer in chain.layers:
        modules: dict[str, Alignment] = {}
        group_of = parameter_groups(layer)
        for name, slot in chain.owned(layer).items():
            path, group = _module_path(chain, layer, name, slot), group_of[name]
            alignment = _alignment(pool, slot, task, variant)
            modules[path] = modules.get(path, Alignment()) + alignment
            groups[group] += alignment
        for path, alignment in modules.items():
            yield {"scope": "module", "path": path, **alignment.values()}
        if modules:
            whole = sum(modules.values(), Alignment())
            yield {"scope": "layer", "path": layer.path, **whole.values()}
            backbone = backbone + whole
    for key in _outside(pool, ("base", variant, expert_of(task))):
        groups["head"] += _alignment(pool, Slot(key), task, variant)
    for group, alignment in groups.items():
        if alignment.expert_energy or alignment.variant_energy:
            yield {"scope": "group", "path": group, **alignment.values()}
    yield {"scope": "backbone", "path": "", **backbone.values()}


def _outside(pool: ModelPool, models: Sequence[str]) -> Iterator[str]:
    """Yield the keys of matrices that all these models have and that belong to no layer."""
    inside = {*pool.chain.parameter_keys(), *pool.chain.tied}
    headers, *others = (pool.source(model).headers for model in models)
    for key, header in headers.items():
        is_matrix = len(header.shape) == 2 and header.dtype.is_floating_point
        if key not in inside and is_matrix and all(key in other for other in others):
            yield key


def _alignment(pool: ModelPool, slot: Slot, task: str, variant: str) -> Alignment:
    alignment = Alignment()
    weights = (pool.stored(model, slot) for model in ("base", variant, expert_of(task)))
    for piece in zip(*(torch.split(weight.flatten(), _PIECE) for weight in weights), strict=True):
        # Widened before the subtraction: a task vector is a small difference of large weights.
        base, moved, expert = (part.double() for part in piece)
        alignment += Alignment.between(moved - base, expert - base)
    return alignment


def _module_path(chain: LayerChain, layer: Layer, name: str, slot: Slot) -> str:
    """Return the module of a parameter in the library's names; parts of fused tensors have names of their own."""
    key = slot.key if slot.rows is None else f"{layer.path}.{name}"
    module = key.rpartition(".")[0]
    return key if not module or chain.blocks[0].path.startswith(f"{module}.") else module
