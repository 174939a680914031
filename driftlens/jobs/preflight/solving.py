"""What the walk that calibrates will take, counted from the sites' shapes before any weight is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from driftlens.checkpoints.sources import TensorHeader
from driftlens.data.samples import SampleSet
from driftlens.jobs.preflight.costs import (
    FIXED_DISK,
    LIVE_COPIES,
    Cost,
    Effort,
    LayerCost,
    Workload,
    disk_bytes,
    effort_of,
    memory_bytes,
    resident_bytes,
    seconds_per_sample,
    width_of,
)
from driftlens.jobs.preflight.rates import rates_here
from driftlens.linalg.gram import held_entries
from driftlens.models.chain import Layer, LayerChain

FORWARDS = 3
"""Passes through a block per sample: the expert's, the merged one that is listened to, the calibrated one."""
_FLOAT64 = 8


@dataclass(frozen=True)
class Group:
    """Linear sites of a layer that read the same, and so have one Gram matrix and one factor.

    Attributes:
        width: k, entries of an input.
        outs: entries of each site's output.
    """

    width: int
    outs: tuple[int, ...]

    @property
    def moments(self) -> int:
        """Numbers in half of the Gram matrix and in the cross moments, of one task."""
        return held_entries(self.width) + self.weights

    @property
    def weights(self) -> int:
        """Numbers that are solved for."""
        return sum(self.outs) * self.width


@dataclass(frozen=True)
class Solving:
    """The walk of one calibration by FeatCal.

    Attributes:
        groups: of every layer up to the last one that is calibrated, in forward order.
        counts: calibration samples by task.
        shared: effort that divides by samples: passes, sums, and the reading of samples.
        solves: effort that divides by groups.
        reads: bytes of one model's weights that the walk reads.
    """

    groups: tuple[tuple[Group, ...], ...]
    counts: Mapping[str, int]
    shared: Effort
    solves: Effort
    reads: int

    @property
    def effort(self) -> Effort:
        """All of it in one process: merged model, base and every expert are read, the merged one's layers twice."""
        return self.shared + self.solves + Effort(reads=self.reads * (len(self.counts) + 2))

    def memory(self, work: Workload, share: float = 1.0) -> int:
        """Peak bytes of a process with a share of the samples.

        One layer of each model, moments of all tasks and of the one at hand, the waiting features.
        """
        sizes = [sum(group.width**2 + group.weights for group in layer) for layer in self.groups]
        moments = max(sizes, default=0) * _FLOAT64
        weights = max((layer.parameter_bytes for layer in work.layers[: len(self.groups)]), default=0)
        state = max(cost.state_bytes for cost in work.layers)
        samples = math.ceil(sum(self.counts.values()) * share)
        waiting = min(2 * state * samples, work.settings.feature_budget)
        # Merged and expert layer, the new weights, and a copy in the dtype that is stored; solved layers are on disk.
        return int(2 * moments + (4 + work.ahead) * weights + waiting + work.batch_size * state * LIVE_COPIES)


def solving(
    chain: LayerChain,
    headers: Mapping[str, TensorHeader],
    sites: Mapping[int, Collection[str]],
    counts: Mapping[str, int],
    layers: Sequence[LayerCost],
) -> Solving:
    """The walk up to the last layer with chosen sites.

    Args:
        chain: the model taken apart.
        headers: of its tensors.
        sites: layer index -> names of the sites to calibrate.
        counts: calibration samples by task.
        layers: what each layer costs on one sample, in float32.
    """
    samples, last, width = sum(counts.values()), max(sites, default=0), width_of(layers)
    passes, solves = (defaultdict[tuple[str, int], float](float) for _ in range(2))
    found = []
    for layer, cost in zip(chain.layers[:last], layers, strict=False):
        passes["blocks", width] += FORWARDS * samples * cost.operations
        groups = _groups(layer, headers, sites.get(layer.index, ()))
        # The narrowest site is as wide as the features.
        tokens = max(1, cost.state_bytes // 4 // min((group.width for group in groups), default=1)) * samples
        for group in groups:
            k, outs = group.width, sum(group.outs)
            through_outputs, through_moments = (
                2 * tokens * outs * k,
                2 * k * k * (tokens + len(counts) * outs),
            )
            passes["sums", k] += tokens * k * k + min(through_outputs, through_moments)
            solves["solves", k] += k**3 / 3 + 2 * outs * k * k
        found.append(groups)
    reads = sum(layer.parameter_bytes for layer in layers[:last])
    return Solving(tuple(found), dict(counts), Effort(passes, samples=samples), Effort(solves), reads)


def look_effort(work: Workload, counts: Mapping[str, int]) -> Effort:
    """What is seen of a new model before all is measured: its final features of `counts` diagnosis samples by task."""
    return _forward(work, sum(min(counts[task], load.diagnosis) for task, load in work.tasks.items()))


def _forward(work: Workload, samples: int) -> Effort:
    """Of so many samples through one model."""
    operations = sum(layer.operations for layer in work.layers)
    return Effort({("blocks", width_of(work.layers)): operations * samples}, samples=samples)


@dataclass(frozen=True)
class Trial:
    """Calibrations of one kind that come behind an analysis.

    Attributes:
        times: how many.
        samples: calibration samples per task.
        effort: processor time of one against FeatCal's.
        variants: models that each leaves in the run; 0 where it is only measured, in its final features.
        traces: whether their drift is traced back to layers.
    """

    times: int
    samples: int
    effort: float = 1.0
    variants: int = 0
    traces: bool = False


def trials_cost(
    work: Workload,
    trials: Sequence[Trial],
    walk_of: Callable[[Mapping[str, int]], Solving],
    sample: SampleSet,
    device: torch.device,
) -> Cost:
    """What calibrations behind an analysis will take, rough as `estimate` is.

    Args:
        work: of the analysis; `merged_bytes` is what a model takes on disk.
        trials: the calibrations.
        walk_of: FeatCal's walk with so many samples of each task.
        sample: to time the reading.
        device: computed on.
    """
    final = _forward(work, sum(task.diagnosis + task.test for task in work.tasks.values()))
    effort, disk, memory = Effort(), 0, 0
    for trial in trials:
        walk = walk_of(dict.fromkeys(work.tasks, trial.samples))
        once, memory = walk.effort * trial.effort, max(memory, walk.memory(work))
        if trial.variants:
            settings = work.settings if trial.traces else replace(work.settings, jacobian=None)
            explained = trial.variants if trial.traces else 0
            kept = replace(work, variants=trial.variants, explained=explained, settings=settings)
            once += effort_of(kept) + look_effort(kept, dict.fromkeys(work.tasks, trial.samples))
            disk += trial.times * (disk_bytes(kept) - FIXED_DISK + (trial.variants - 1) * work.merged_bytes)
        else:
            once += final
        effort += once * trial.times
    seconds = effort.seconds(rates_here(device, width_of(work.layers)), seconds_per_sample(sample))
    return Cost(resident_bytes() + max(memory_bytes(work), memory), disk, seconds)


def _groups(layer: Layer, headers: Mapping[str, TensorHeader], wanted: Collection[str]) -> tuple[Group, ...]:
    """The layer's linear sites that are solved for, by what they read."""
    found: dict[tuple[str, int], list[int]] = {}
    for site in layer.sites:
        if site.kind == "linear" and site.name in wanted:
            slot = layer.parameters[f"{site.name}.weight"]
            out, width = slot.shape(headers[slot.key].shape)
            found.setdefault((site.input, width), []).append(out)
    return tuple(Group(width, tuple(outs)) for (_, width), outs in found.items())
