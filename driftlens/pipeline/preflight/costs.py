"""What an analysis will take, counted from the layers' shapes before any weight is read.

Rough on purpose: what is counted is what grows with the model and the samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from driftlens.data.samples import SampleSet
from driftlens.diagnostic import chosen
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.walk import on_device
from driftlens.models.architecture import Architecture
from driftlens.models.chain import Pool
from driftlens.models.interception import buffers_on
from driftlens.pipeline.analyze.causes import BATCH
from driftlens.pipeline.analyze.evaluation import CHUNK_BYTES
from driftlens.pipeline.study.study import Settings
from driftlens.records.layout import THUMB_SIDE

FORWARDS = 3
"""Passes of a calibration through a block per sample: the expert's, the merged model's that is listened to, its own."""
FIXED_DISK = 80_000
"""Bytes of a run whatever its size: manifest, layer, parameter and accuracy tables, events (measured)."""
SAMPLE_ROW, OUTPUT_ROW, SAMPLE_ID = 35, 120, 25
"""Bytes per row of the sample and output tables, and per sample id in the manifest (measured)."""
POWER_STEPS = 30 * 3
"""Derivative passes per node of a spectral norm: 30 steps, each forward and backward."""
LIVE_COPIES = 8
"""Tensors of the size of a batch's features that one layer holds at its widest: its MLP is four times as wide."""
PROBE_SECONDS = 0.1
PROBE_WIDTH = 1024
EFFICIENCY = 0.4
"""Share of a bare product's rate that layers reach beside norms, activations and derivatives (0.37 at width 192)."""


@dataclass(frozen=True)
class LayerCost:
    """One layer on one sample.

    Attributes:
        operations: floating-point operations, two per multiply-add.
        parameter_bytes: of its weights.
        state_bytes: of the features behind it.
        width: length of the pooled vector behind it.
    """

    operations: int
    parameter_bytes: int
    state_bytes: int
    width: int


@dataclass(frozen=True)
class TaskLoad:
    """How many samples of one task are looked at.

    Attributes:
        diagnosis: samples whose drift is measured.
        test: samples that are scored.
        ids: all samples that the manifest names.
        thumbs: pictures that the run keeps for viewers.
    """

    diagnosis: int
    test: int
    ids: int
    thumbs: int = 0


@dataclass(frozen=True)
class Workload:
    """What decides the cost of an analysis.

    Attributes:
        layers: of the chain, on one sample.
        tasks: samples, by task.
        variants: how many models are compared with each expert.
        explained: how many of them have their drift traced back to layers.
        settings: what is computed.
        batch_size: samples per forward pass.
        merged_bytes: of the merged model that the run will keep; 0 when it is given.
    """

    layers: tuple[LayerCost, ...]
    tasks: Mapping[str, TaskLoad]
    variants: int
    explained: int
    settings: Settings
    batch_size: int
    merged_bytes: int = 0

    @property
    def stored_widths(self) -> list[int]:
        """Lengths of the pooled vectors that are kept."""
        return [self.layers[index - 1].width for index in self.settings.stored_layers]


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


def solving(
    layer: LayerCost, shapes: Sequence[Sequence[int]], samples: int, num_tasks: int, itemsize: int
) -> int:
    """Floating-point operations of calibrating one layer on so many samples, two per multiply-add.

    Args:
        layer: its cost on one sample.
        shapes: [out, in] of its linear sites.
        samples: of all tasks together.
        num_tasks: how many they are.
        itemsize: bytes of a number.
    """
    total = FORWARDS * samples * layer.operations
    # The narrowest site is as wide as the features.
    entries, narrowest = layer.state_bytes // itemsize, min((k for _, k in shapes), default=1)
    tokens = max(1, entries // narrowest) * samples
    for out, width in shapes:
        through_outputs = 2 * tokens * out * width
        through_moments = 2 * width * width * (tokens + num_tasks * out)
        total += tokens * width * width + min(through_outputs, through_moments)
        total += width**3 // 3 + 2 * out * width * width
    return total


@torch.no_grad()
def layer_costs(
    architecture: Architecture, inputs: object, dtype: torch.dtype, pool: Pool
) -> tuple[LayerCost, ...]:
    """The cost of every layer on the raw inputs of one sample.

    It comes from a forward pass of shapes alone through the blocks; stem and head, which may ask for values, run on
    numbers that stand for weights and take no memory.
    """
    shapes = {key: value.shape for key, value in architecture.skeleton.state_dict().items()}
    here = next((buffer.device for buffer in architecture.skeleton.buffers()), torch.device("cpu"))
    bare = torch.device("meta")
    state, side = architecture.chain.start(on_device(inputs, here, dtype))
    found = []
    for layer in architecture.chain.layers:
        place = bare if layer.role == "block" else here
        stored = {
            slot.key: torch.zeros((), dtype=dtype, device=place).expand(shapes[slot.key])
            for slot in layer.parameters.values()
        }
        parameters = {
            name: slot.own(stored[slot.key] if slot.rows is None else stored[slot.key][slice(*slot.rows)])
            for name, slot in layer.parameters.items()
        }
        state = {
            name: torch.zeros(leaf.shape, dtype=leaf.dtype, device=place) for name, leaf in state.items()
        }
        with FlopCounterMode(display=False) as counter, buffers_on(architecture.skeleton, place):
            state = layer.call(parameters, state, side.to(place))
        found.append(
            LayerCost(
                operations=counter.get_total_flops(),
                parameter_bytes=sum(value.nbytes for value in parameters.values()),
                state_bytes=sum(leaf.nbytes for leaf in state.values()),
                width=layer.vectors(state, side, pool).shape[-1],
            )
        )
    return tuple(found)


def disk_bytes(work: Workload) -> int:
    """Size of the run directory: features in float16, tables, the manifest's sample ids, the merged model."""
    models, stored = work.variants + 1, work.stored_widths
    total = FIXED_DISK + work.merged_bytes
    for task in work.tasks.values():
        rows = work.variants * task.diagnosis
        total += models * sum(task.diagnosis * width * 2 + 128 for width in stored)
        total += rows * (len(stored) * SAMPLE_ROW + OUTPUT_ROW) + task.ids * SAMPLE_ID
        # Pictures hardly compress: an upper bound, reached by noise.
        total += task.thumbs * THUMB_SIDE**2 * 3
    return total


def memory_bytes(work: Workload) -> int:
    """Peak memory beside what the process holds before: the greediest of walk, Jacobians and evaluation."""
    largest = max(layer.state_bytes for layer in work.layers)
    weights = max(layer.parameter_bytes for layer in work.layers)
    n = max(task.diagnosis for task in work.tasks.values())
    models = work.variants + 1
    chunk = min(n * largest * models, work.settings.feature_budget)
    # The first batch is also run by the library itself: its features at every boundary stay until the task is done.
    library = (work.variants + 2) * len(work.layers) * min(n, work.batch_size) * largest
    # Pooled features of all layers are kept in float32, and copied once when they are joined.
    kept = 2 * models * n * sum(layer.width for layer in work.layers) * 4
    active = work.batch_size * largest * LIVE_COPIES
    walk = models * weights + chunk + library + kept + active
    evaluation = weights + CHUNK_BYTES + active if any(task.test for task in work.tasks.values()) else 0
    return max(walk, kept + _jacobian_bytes(work, largest, weights), evaluation)


def _jacobian_bytes(work: Workload, largest: int, weights: int) -> int:
    jacobian = work.settings.jacobian
    if jacobian is None:
        return 0
    samples = min(jacobian.samples, max(task.diagnosis for task in work.tasks.values()))
    # One vector per layer and sample is carried to the end, and one prefix per layer.
    vectors = len(work.layers) * (jacobian.contributions + jacobian.prefix)
    vectors += 5 * len(work.layers) * bool({"adjoint", "groups"} & work.settings.options)  # on the way back
    at_work = BATCH * LIVE_COPIES * (len(work.layers) if jacobian.contributions else 1)
    return 2 * weights + (samples * (vectors + 3) + at_work) * largest


def operations(work: Workload) -> int:
    """Floating-point operations of every forward pass and derivative."""
    forward = sum(layer.operations for layer in work.layers)
    total = 0
    for task in work.tasks.values():
        # Each variant runs on its own features and on the expert's; the library repeats the first batch.
        total += forward * task.diagnosis * (1 + 2 * work.variants)
        total += forward * min(task.diagnosis, work.batch_size) * (1 + work.variants)
        total += forward * task.test * (1 + work.variants)
        for entry in chosen(work.settings.options):
            total += work.variants * sum(entry.cost(task.diagnosis, width) for width in work.stored_widths)
        if work.settings.jacobian is not None:
            samples = min(work.settings.jacobian.samples, task.diagnosis)
            total += (
                work.explained * samples * (3 * forward + _jacobian_operations(work, work.settings.jacobian))
            )
    return total


def _jacobian_operations(work: Workload, jacobian: JacobianSettings) -> int:
    """Per sample: every vector carried so far goes through each layer once per node."""
    # About half of the layers want their nodes doubled once, which repeats the layer with twice as many.
    nodes = min(2 * jacobian.nodes, jacobian.max_nodes)
    total = 0
    for index, layer in enumerate(work.layers[1:], start=2):
        vectors = index + 1 if jacobian.contributions else 2
        passes = nodes * (1 + vectors) + (nodes * POWER_STEPS if jacobian.spectral else 0)
        # A pass back costs about three; of groups, some eight are switched in two orders.
        options = work.settings.options
        back = 9 * nodes * ("adjoint" in options) + (3 * nodes + 16) * ("groups" in options)
        total += layer.operations * (passes + back + (index - 2 if jacobian.prefix else 0))
    return total


def samples_read(work: Workload) -> int:
    """How many times a sample is read and preprocessed; accuracy reads the test samples once per model."""
    jacobian = work.settings.jacobian
    explained = 0 if jacobian is None else work.explained * jacobian.samples
    return sum(
        task.diagnosis + min(explained, work.explained * task.diagnosis) + task.test * (1 + work.variants)
        for task in work.tasks.values()
    )


@dataclass(frozen=True)
class Cost:
    """What an analysis will take, roughly.

    Attributes:
        memory_bytes: peak resident memory.
        disk_bytes: size of the run directory.
        seconds: wall-clock time on this machine.
    """

    memory_bytes: int
    disk_bytes: int
    seconds: float

    def text(self) -> str:
        """The same in words."""
        memory, disk = size_text(self.memory_bytes), size_text(self.disk_bytes)
        return f"about {memory} of memory, {disk} on disk, {_duration(self.seconds)}"


def estimate(
    work: Workload,
    sample: SampleSet,
    device: torch.device,
    dtype: torch.dtype,
    *,
    more_operations: int = 0,
    more_samples: int = 0,
) -> Cost:
    """What the workload will take on this machine, and operations and samples beside those of the workload.

    A matrix product is timed, and the reading of a few samples.
    """
    rate = EFFICIENCY * _operations_per_second(work, device, dtype)
    seconds = (operations(work) + more_operations) / rate
    seconds += (samples_read(work) + more_samples) * _seconds_per_sample(sample)
    return Cost(_resident() + memory_bytes(work), disk_bytes(work), seconds)


def trials_cost(
    work: Workload,
    trials: Sequence[Trial],
    shapes: Sequence[Sequence[Sequence[int]]],
    sample: SampleSet,
    device: torch.device,
    dtype: torch.dtype,
) -> Cost:
    """What calibrations behind an analysis will take, rough as `estimate` is.

    Args:
        work: of the analysis; `merged_bytes` is what a model takes on disk.
        trials: the calibrations.
        shapes: by layer, [out, in] of the linear sites.
        sample: to time the reading.
        device: computed on.
        dtype: computed in.
    """
    total, reads, disk = 0, 0, 0
    forward, num_tasks = sum(layer.operations for layer in work.layers), len(work.tasks)
    shown = sum(task.diagnosis + task.test for task in work.tasks.values())
    for trial in trials:
        count = trial.samples * num_tasks
        each = sum(
            solving(layer, own, count, num_tasks, dtype.itemsize)
            for layer, own in zip(work.layers, shapes, strict=True)
        )
        once = round(trial.effort * each)
        if trial.variants:
            settings = work.settings if trial.traces else replace(work.settings, jacobian=None)
            explained = trial.variants if trial.traces else 0
            kept = replace(work, variants=trial.variants, explained=explained, settings=settings)
            once += operations(kept)
            disk += trial.times * (disk_bytes(kept) - FIXED_DISK + (trial.variants - 1) * work.merged_bytes)
        else:
            once += forward * shown
        total += trial.times * once
        reads += trial.times * (count + shown * max(1, trial.variants))
    seconds = total / (EFFICIENCY * _operations_per_second(work, device, dtype))
    seconds += reads * _seconds_per_sample(sample)
    # Moments in float64, twice; solutions; what waits at a boundary: of the calibrated model and of the expert.
    most = max((trial.samples for trial in trials), default=0) * num_tasks
    layer_moments = max(sum(k * k + out * k for out, k in own) * 8 for own in shapes)
    waiting = min(2 * most * max(at.state_bytes for at in work.layers), work.settings.feature_budget)
    solutions = sum(out * k for own in shapes for out, k in own) * dtype.itemsize
    memory = memory_bytes(work) + 2 * layer_moments + waiting + 2 * solutions
    return Cost(_resident() + memory, disk, seconds)


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _operations_per_second(work: Workload, device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a product of the size that a layer does on a batch."""
    # Wider products run no faster, and pooled vectors of `layers.pool: all` are wide beyond reason.
    width = min(PROBE_WIDTH, max(layer.width for layer in work.layers))
    rows = torch.ones(min(2048, 16 * work.batch_size), width, device=device, dtype=dtype)
    weight = torch.ones(width, 4 * width, device=device, dtype=dtype)
    float((rows @ weight)[0, 0])  # the first product also loads the library
    products, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < PROBE_SECONDS:
        float((rows @ weight)[0, 0])  # reading a number waits for a GPU
        products += 1
    return products * 2 * rows.numel() * weight.shape[1] / passed


def _seconds_per_sample(samples: SampleSet) -> float:
    count = min(8, len(samples))
    samples.load([0])  # the first one also imports and opens what reads it
    started = time.perf_counter()
    samples.load(range(count))
    return (time.perf_counter() - started) / count


def size_text(count: int) -> str:
    """A number of bytes as a person reads it."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.2g} {unit}" if size < 10 else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2g} TB" if size < 10 else f"{size:.0f} TB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
