"""What models give their blocks beside features and compute of weights outside them: each model has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from driftlens.models.chain import Parameters
from driftlens.models.taking_apart.interception import call


class _Positions(nn.Module):
    """Returns the embeddings of relative positions that an encoder of DeBERTa gives to all its blocks."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self) -> Tensor:
        embeddings: Tensor = self.encoder.get_rel_embedding()  # type: ignore[operator]
        return embeddings


@dataclass(frozen=True, eq=False)
class Computed:
    """An argument of blocks that depends on weights alone, which blocks therefore count among theirs.

    Attributes:
        positions: computes it.
        names: of the weights that it reads, by their names in the whole model.
    """

    positions: nn.Module
    names: Mapping[str, str]

    def value(self, parameters: Parameters) -> Tensor:
        """What one model gives its blocks, of parameters that hold these weights under the whole model's names."""
        weights = {name: parameters[key] for key, name in self.names.items()}
        value: Tensor = call(self.positions, weights, (), {})
        return value


def computed_arguments(module: nn.Module) -> dict[str, Computed]:
    """By their names, the arguments of a model's blocks that are known to be computed of weights outside them."""
    for path, part in module.named_modules():
        if hasattr(part, "get_rel_embedding") and isinstance(
            table := getattr(part, "rel_embeddings", None), nn.Embedding
        ):
            inside: list[tuple[str, nn.Module]] = [("rel_embeddings", table)]
            if isinstance(norm := getattr(part, "LayerNorm", None), nn.LayerNorm):
                inside.append(("LayerNorm", norm))
            names = {
                f"{path}.{name}.{leaf}".lstrip("."): f"encoder.{name}.{leaf}"
                for name, owner in inside
                for leaf, _ in owner.named_parameters()
            }
            return {"rel_embeddings": Computed(_Positions(part), names)}
    return {}
