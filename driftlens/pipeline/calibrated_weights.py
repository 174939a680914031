"""Calibrated parameters back in a checkpoint's form, and the same model with its anchor instead of the solution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from driftlens.models.chain import LayerChain
from driftlens.models.export import fused
from driftlens.models.saving import patched
from driftlens.models.sources import StateSource, TensorHeader

Key = tuple[int, str]
"""Layer index, and a parameter name of the layer's own."""


def with_parameters(
    chain: LayerChain, merged: StateSource, like: StateSource, parameters: Mapping[Key, Tensor]
) -> StateSource:
    """The merged model with some parameters replaced, in the dtypes of `like`.

    Args:
        chain: of both.
        merged: under the skeleton's key names.
        like: the base (or what stands for it); a merged model stored in fewer bits must not round the solution.
        parameters: new values, in the layers' own layout.

    Raises:
        NumericsError: a value is NaN or infinite, or becomes so in the base's dtype.
    """
    start = _InDtypesOf(merged, like)
    return patched(start, fused(chain, parameters, start))


def anchors(
    chain: LayerChain, merged: StateSource, base: StateSource, rho: float, keys: Iterable[Key]
) -> dict[Key, Tensor]:
    """rho * merged + (1 - rho) * base (Eq. 11) for the given parameters, in float64.

    With these in place of the solution a calibration becomes its own control: what lambda = infinity would give.
    """
    found = {}
    for index, name in keys:
        slot = chain.layers[index - 1].parameters[name]
        start, end = (source.read(slot.key, slot.rows).double() for source in (base, merged))
        value = rho * end + (1 - rho) * start
        found[index, name] = value.mT if slot.transposed else value
    return found


class _InDtypesOf:
    """A source whose tensors come in the dtypes of another one with the same keys."""

    def __init__(self, source: StateSource, like: StateSource) -> None:
        self.name = source.name
        self.headers: Mapping[str, TensorHeader] = {
            key: TensorHeader(header.shape, like.headers[key].dtype if key in like.headers else header.dtype)
            for key, header in source.headers.items()
        }
        self._source = source

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        return self._source.read(key, rows).to(self.headers[key].dtype)
