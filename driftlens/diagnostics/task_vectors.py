"""How a variant's task vector lies to an expert's: cosine, norm ratio, sign agreement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.diagnostic import diagnostic
from driftlens.engine.pool import ModelPool
from driftlens.models.chain import Layer, LayerChain, Slot
from driftlens.records.schema import PARAMS
from driftlens.variants import expert_of

_PIECE = 2**22
"""Entries that are widened to float64 at a time: the embeddings of a vocabulary are large."""


@dataclass(frozen=True)
class Alignment:
    """Sums over the entries of two task vectors; they add, so a layer is the sum of its modules.

    Attributes:
        dot: sum of variant * expert.
        variant_energy: sum of variant squared.
        expert_energy: sum of expert squared.
        agreeing: entries in which both are non-zero and of one sign.
        moved: entries in which both are non-zero.
    """

    dot: float = 0.0
    variant_energy: float = 0.0
    expert_energy: float = 0.0
    agreeing: int = 0
    moved: int = 0

    @classmethod
    def of(cls, variant: Tensor, expert: Tensor) -> Alignment:
        """The sums of one pair of task vectors of equal shape, accumulated in float64."""
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
        """`cos`, `norm_ratio` (variant over expert) and `sign_agreement`; None where one vector is zero."""
        both = self.variant_energy > 0 and self.expert_energy > 0
        return {
            "cos": self.dot / (self.variant_energy * self.expert_energy) ** 0.5 if both else None,
            "norm_ratio": (self.variant_energy / self.expert_energy) ** 0.5
            if self.expert_energy > 0
            else None,
            "sign_agreement": self.agreeing / self.moved if self.moved else None,
        }


def task_vector_cosine(variant: Tensor, expert: Tensor) -> float | None:
    """Cosine between two task vectors (each: weights minus the base's) of any equal shape; None if one is zero."""
    return Alignment.of(variant, expert).values()["cos"]


@diagnostic(
    "task_vectors", table="params", columns=PARAMS.columns[len(PARAMS.key) :], needs="weights", option=""
)
def alignment_rows(pool: ModelPool, task: str, variant: str) -> Iterator[dict[str, object]]:
    """Rows of the `params` table for one task and variant: every module, every layer, the whole backbone.

    A parameter counts once, in the first layer that lists it. Reads one layer of three models at a time.
    """
    backbone = Alignment()
    for layer in pool.chain.layers:
        modules = _module_alignments(pool, layer, task, variant)
        for path, alignment in modules.items():
            yield {"scope": "module", "path": path, **alignment.values()}
        if modules:
            whole = sum(modules.values(), Alignment())
            yield {"scope": "layer", "path": layer.path, **whole.values()}
            backbone = backbone + whole
    yield {"scope": "backbone", "path": "", **backbone.values()}


def _module_alignments(pool: ModelPool, layer: Layer, task: str, variant: str) -> dict[str, Alignment]:
    modules: dict[str, Alignment] = {}
    for name, slot in pool.chain.owned(layer).items():
        weights = (pool.parameter(model, slot) for model in ("base", variant, expert_of(task)))
        path = _module_path(pool.chain, layer, name, slot)
        for piece in zip(*(torch.split(weight.flatten(), _PIECE) for weight in weights), strict=True):
            base, moved, expert = (part.double() for part in piece)
            modules[path] = modules.get(path, Alignment()) + Alignment.of(moved - base, expert - base)
    return modules


def _module_path(chain: LayerChain, layer: Layer, name: str, slot: Slot) -> str:
    """The module a parameter belongs to, in the library's names; parts of fused tensors have names of their own.

    So have parameters of whatever holds all layers: a model's own stand for themselves, inside a larger one too.
    """
    key = slot.key if slot.rows is None else f"{layer.path}.{name}"
    module = key.rpartition(".")[0]
    return key if not module or chain.blocks[0].path.startswith(f"{module}.") else module
