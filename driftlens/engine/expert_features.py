"""A cache of what experts' layers compute, shared by calibrations on the same samples: `ExpertFeatures`.

An expert's features don't depend on the merged model or on a calibrator's settings. A later calibration that wants the
same sites takes them from the cache, and gets bit-identical weights. Beyond its budget nothing is cached: reading
features of all layers back from disk takes as long as computing them again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from driftlens.engine.sites import SiteRows, rows_and_output
from driftlens.engine.walk import WaitingBatch
from driftlens.models.chain import Layer, Parameters, State

_Key = tuple[str, int, int, frozenset[str], frozenset[str], bool]


@dataclass
class ExpertFeatures:
    """What experts' sites see and give, and what leaves their layers, of one set of samples; 0 bytes cache nothing."""

    budget: int = 0
    _num_bytes: int = field(default=0, init=False)
    _passes: dict[_Key, tuple[SiteRows, State]] = field(default_factory=dict, init=False)

    def rows_and_output(
        self,
        task: str,
        batch: WaitingBatch,
        layer: Layer,
        expert: Parameters,
        state: State,
        inputs: Collection[str],
        outputs: Collection[str],
        *,
        stops: bool,
    ) -> tuple[SiteRows, State]:
        """Return what `rows_and_output` returns of an expert's layer, from the cache where it was computed before.

        Args:
            task: whose expert it is.
            batch: some of the task's samples; a cache is asked for the same batches every time.
            layer: the layer to run.
            expert: the expert's parameters of the layer.
            state: the expert's features before the layer.
            inputs: sites whose inputs are wanted.
            outputs: sites whose outputs are wanted.
            stops: whether the layer is left after the last of these sites.
        """
        key = task, batch.start, layer.index, frozenset(inputs), frozenset(outputs), stops
        if key in self._passes:
            return self._passes[key]
        found = rows_and_output(layer, expert, state, batch.side, inputs, outputs, stops=stops)
        num_bytes = self._num_bytes + _bytes_of(*found)
        if num_bytes <= self.budget:
            self._num_bytes = num_bytes
            self._passes[key] = found
        return found


def _bytes_of(rows: SiteRows, state: State) -> int:
    """Return the memory of all tensors; sites that read the same tensor share it."""
    tensors: list[Tensor] = [*rows.inputs.values(), *rows.outputs.values(), *state.values()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
