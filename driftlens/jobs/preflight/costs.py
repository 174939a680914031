"""What an analysis will take, counted from the layers' shapes before any weight is read.

Rough on purpose: what is counted is what grows with the model and the samples.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.flop_counter import FlopCounterMode

from driftlens.base.diagnostic import chosen
from driftlens.data.samples import SampleSet
from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.forward_order import on_device
from driftlens.jobs.analyze.causes import BATCH
from driftlens.jobs.analyze.evaluation import CHUNK_BYTES
from driftlens.jobs.preflight.rates import Rates, rates_here
from driftlens.jobs.study.study import Settings
from driftlens.models.architecture import Architecture
from driftlens.models.chain import Pool
from driftlens.models.taking_apart.interception import buffers_on
from driftlens.runs.layout import THUMB_SIDE

FIXED_DISK = 80_000
"""Bytes of a run whatever its size: manifest, layer, parameter and accuracy tables, events (measured)."""
SAMPLE_ROW, OUTPUT_ROW, SAMPLE_ID = 35, 120, 25
"""Bytes per row of the sample and output tables, and per sample id in the manifest (measured)."""
POWER_STEPS = 30 * 3
"""Derivative passes per node of a spectral norm: 30 steps, each forward and backward."""
LIVE_COPIES = 8
"""Tensors of the size of a batch's features that one layer holds at its widest: its MLP is four times as wide."""


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
        answer: tokens with which a model answers each of these at most; 0 where it is scored without.
        ids: all samples that the manifest names.
        thumbs: pictures that the run keeps for viewers.
    """

    diagnosis: int
    test: int
    ids: int
    thumbs: int = 0
    answer: int = 0


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
        ahead: layers of each model that are read while one computes, see `ReadAhead`: 1 on a GPU.
    """

    layers: tuple[LayerCost, ...]
    tasks: Mapping[str, TaskLoad]
    variants: int
    explained: int
    settings: Settings
    batch_size: int
    merged_bytes: int = 0
    ahead: int = 0

    @property
    def stored_widths(self) -> list[int]:
        """Lengths of the pooled vectors that are kept."""
        return [self.layers[index - 1].width for index in self.settings.stored_layers]


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
    read = (1 + work.ahead) * weights
    walk = models * read + chunk + library + kept + active
    evaluation = read + CHUNK_BYTES + active if any(task.test for task in work.tasks.values()) else 0
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


def _step_operations(work: Workload) -> float:
    """Of the passes in which answers grow, token by token."""
    tokens = statistics.median(max(1, layer.state_bytes // 4 // layer.width) for layer in work.layers)
    forward = sum(layer.operations for layer in work.layers) / tokens
    return sum(forward * task.test * task.answer * (1 + work.variants) for task in work.tasks.values())


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
        return f"about {memory} of memory, {disk} on disk, {duration_text(self.seconds)}"


@dataclass(frozen=True)
class Effort:
    """Work by kind; efforts add, and a share of one is `effort * share`.

    Attributes:
        operations: ("blocks", "steps", "sums" or "solves", width) -> floating-point operations.
        samples: how often a sample is read and preprocessed.
        reads: bytes of weights that are read.
    """

    operations: Mapping[tuple[str, int], float] = field(default_factory=Counter)
    samples: float = 0
    reads: float = 0

    def __add__(self, other: Effort) -> Effort:
        keys = dict.fromkeys([*self.operations, *other.operations])
        operations = {key: self.operations.get(key, 0) + other.operations.get(key, 0) for key in keys}
        return Effort(operations, self.samples + other.samples, self.reads + other.reads)

    def __mul__(self, share: float) -> Effort:
        operations = {key: count * share for key, count in self.operations.items()}
        return Effort(operations, self.samples * share, self.reads * share)

    def seconds(self, rates: Rates, per_sample: float, pace: float = 1.0) -> float:
        """Wall-clock time of one process that has `pace` of these rates."""
        computed = sum(count / rates.at(*key) for key, count in self.operations.items())
        return (computed + self.samples * per_sample + self.reads / rates.reads) / pace


def width_of(layers: Sequence[LayerCost]) -> int:
    """About how wide the blocks are: a transformer's has 12 numbers for every two of its width (float32)."""
    return max(1, round(math.sqrt(statistics.median(layer.parameter_bytes for layer in layers) / 48)))


def effort_of(work: Workload) -> Effort:
    """The effort of an analysis."""
    width = width_of(work.layers)
    found: dict[tuple[str, int], float] = {("blocks", width): operations(work)}
    if steps := _step_operations(work):
        found["steps", width] = steps
    return Effort(found, samples_read(work))


def estimate(
    work: Workload, sample: SampleSet, device: torch.device, *, more: Effort = Effort(), memory: int = 0
) -> Cost:
    """What the workload will take on this machine, and more beside it: `memory` is beyond that of the workload.

    Rates are those that were measured, else a block, sums and solves are timed, and the reading of a few samples.
    """
    rates = rates_here(device, width_of(work.layers))
    seconds = (effort_of(work) + more).seconds(rates, seconds_per_sample(sample))
    return Cost(resident_bytes() + memory_bytes(work) + memory, disk_bytes(work), seconds)


def resident_bytes() -> int:
    """What this process holds already."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def seconds_per_sample(samples: SampleSet) -> float:
    """Wall-clock time in which one sample is read and preprocessed."""
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


def duration_text(seconds: float) -> str:
    """A time as a person reads it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
