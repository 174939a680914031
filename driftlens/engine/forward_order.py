"""The walk that calibrates: layer by layer, on features that the layers calibrated before really give.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. Alive at a time: one layer of the expert at hand, the merged model and the base, the sums
of one layer, and the features that wait, those beyond a budget on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from driftlens.data.samples import Batch
from driftlens.engine.exactness import exact_products
from driftlens.engine.finite import FiniteWatch
from driftlens.engine.layer_solve import solve_layer
from driftlens.engine.layer_sums import LayerSums
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import CalibratedLayer, Calibrator
from driftlens.engine.site_rows import rows_and_output, rows_only
from driftlens.engine.waiting import FeatureStore, WaitingBatch
from driftlens.engine.walk import on_device
from driftlens.errors import DataError, SpecError
from driftlens.linalg.gram import GramPool
from driftlens.models.chain import Layer, Parameters, Pool, State, pooled
from driftlens.variants import expert_of

Samples = Mapping[str, Callable[[], Iterable[Batch]]]
"""Task -> a function that gives its calibration samples, each time anew; it is called once."""

_EXPERT, _MERGED = "expert", "merged"
_IN_WORDS = {_EXPERT: "the expert", _MERGED: "the merged model"}


def calibrate(
    pool: ModelPool,
    samples: Samples,
    calibrator: Calibrator,
    *,
    sites: Mapping[int, Collection[str]],
    merged: str = "merged",
    base: str | None = "base",
    feature_budget: int = 2 * 2**30,
    spill: Path | None = None,
    done: Mapping[int, Mapping[str, Tensor]] | None = None,
    on_step: Callable[[int, str], None] | None = None,
    ids: Mapping[str, Sequence[str]] | None = None,
    pooling: Pool = "cls",
    objectives: bool = True,
) -> Iterator[CalibratedLayer]:
    """Calibrated layers in forward order, one for each layer with chosen sites that is not done yet.

    Nothing of the pool is modified. Tasks are taken in the order of their names, whatever the order of `samples`. The
    walk ends after the last layer with chosen sites.

    Args:
        pool: base, merged model and one expert per task.
        samples: calibration samples by task.
        calibrator: settings and closed forms.
        sites: layer index -> names of its sites, see `select_sites`.
        merged: the pool's name of the model to calibrate.
        base: the pool's name of the base, or None without one.
        feature_budget: bytes of waiting features, over all tasks, that may stay in memory.
        spill: folder for features beyond the budget, emptied again whatever happens; None keeps all in memory.
        done: layers calibrated before an interruption -> their updates, which are applied and not recomputed.
        on_step: called with layer index and task before every batch; it may raise, `Cancelled` for instance.
        ids: sample ids by task, for messages.
        pooling: how one vector per sample is taken for `drift_l2_mean`.
        objectives: whether reports hold the objectives of linear sites; on CPUs they cost about a tenth of the time.

    Raises:
        SpecError: a setting makes no sense, or a task has no expert in the pool.
        DataError: a task has no samples.
        NumericsError: weights or features are NaN or infinite; names layer, task and sample.
        SingularGramError: a site can't be solved for as asked; names it.
    """
    calibrator.check(has_base=base is not None)
    _require_tasks(pool, samples)
    finished = done or {}
    remaining = {index: names for index, names in sites.items() if names and index not in finished}
    walk = _Walk(
        pool,
        samples,
        calibrator,
        store=FeatureStore(feature_budget, spill),
        merged=merged,
        base=base,
        on_step=on_step or (lambda layer, task: None),
        ids=ids or {},
        pooling=pooling,
        objectives=objectives,
    )
    return _layers(walk, remaining, finished)


def _layers(
    walk: _Walk, sites: Mapping[int, Collection[str]], done: Mapping[int, Mapping[str, Tensor]]
) -> Iterator[CalibratedLayer]:
    last = max(sites, default=0)
    with walk.store:
        for layer in walk.pool.chain.layers[:last]:
            names, is_last = sites.get(layer.index, ()), layer.index == last
            if names:
                yield walk.calibrate(layer, names, is_last=is_last)
            else:
                walk.pass_through(layer, done.get(layer.index, {}))


@dataclass
class _Walk:
    """What stays the same from layer to layer, and the features that wait at the boundary reached."""

    pool: ModelPool
    samples: Samples
    calibrator: Calibrator
    store: FeatureStore
    merged: str
    base: str | None
    on_step: Callable[[int, str], None]
    ids: Mapping[str, Sequence[str]]
    pooling: Pool
    objectives: bool
    waiting: dict[str, list[WaitingBatch]] = field(default_factory=dict)
    grams: GramPool = field(default_factory=GramPool)

    @property
    def tasks(self) -> list[str]:
        return sorted(self.samples)

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""
        merged = self.pool.parameters(self.merged, layer)
        sums = LayerSums(
            self.pool.chain, layer, names, self.calibrator, objectives=self.objectives, grams=self.grams
        )
        for task in self.tasks:
            self._sum_up(layer, merged, sums, task, needs_output=not is_last)
        base = None if self.base is None else self.pool.parameters(self.base, layer)
        stored_as = self.merged if self.base is None else self.base
        problems = sums.problems(merged, base)
        updates, reports = solve_layer(self.pool, layer, problems, self.calibrator, stored_as=stored_as)
        self.grams.take_back()
        drift = {} if is_last else self._advance(layer, merged | updates)
        return CalibratedLayer(layer.index, updates, reports, drift)

    @torch.no_grad()
    @exact_products()
    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Take all features to the next boundary, the merged model's through the parameters in `done`."""
        merged = self.pool.parameters(self.merged, layer)
        merged |= {name: value.to(merged[name]) for name, value in done.items()}
        for task in self.tasks:
            expert = self.pool.parameters(expert_of(task), layer)
            watch = FiniteWatch(layer, task, self.ids.get(task, ()))
            for batch in self._batches(layer, task, waits=False):
                for model, parameters in ((_EXPERT, expert), (_MERGED, merged)):
                    out = layer.call(parameters, batch.get(model), batch.side)
                    watch.see(_IN_WORDS[model], out[layer.stream])
                    batch.put(model, out)
            watch.check()

    def _sum_up(
        self, layer: Layer, merged: Parameters, sums: LayerSums, task: str, *, needs_output: bool
    ) -> None:
        expert = self.pool.parameters(expert_of(task), layer)
        watch = FiniteWatch(layer, task, self.ids.get(task, ()))
        for batch in self._batches(layer, task):
            theirs, state = batch.get(_EXPERT), batch.get(_MERGED)
            if needs_output:
                seen, out = rows_and_output(
                    layer, expert, theirs, batch.side, sums.expert_inputs, sums.expert_outputs
                )
                watch.see(_IN_WORDS[_EXPERT], out[layer.stream])
                batch.put(_EXPERT, out)
            else:
                seen = rows_only(layer, expert, theirs, batch.side, sums.expert_inputs, sums.expert_outputs)
            mine = rows_only(layer, merged, state, batch.side, sums.merged_inputs)
            sums.add(mine, seen, state, batch.side, expert, len(self.waiting.get(task, ())))
        watch.check()
        sums.end_task(expert)

    def _advance(self, layer: Layer, merged: Parameters) -> dict[str, float]:
        """Take the merged model's features through the calibrated layer; the mean drift behind it, by task."""
        drift: dict[str, float] = {}
        for task in self.tasks:
            watch = FiniteWatch(layer, task, self.ids.get(task, ()))
            sizes = []
            for batch in self._batches(layer, task):
                out = layer.call(merged, batch.get(_MERGED), batch.side)
                watch.see("the calibrated model", out[layer.stream])
                sizes.append(self._drift(layer, out, batch))
                batch.put(_MERGED, out)
            watch.check()
            drift[task] = float(torch.cat(sizes).mean())
        return drift

    def _drift(self, layer: Layer, out: State, batch: WaitingBatch) -> Tensor:
        mask = batch.side.get(f"{layer.stream}_mask")
        expert = batch.get(_EXPERT)[layer.stream]
        difference = pooled(out[layer.stream], self.pooling, mask) - pooled(expert, self.pooling, mask)
        return torch.linalg.vector_norm(difference.double(), dim=1)

    def _batches(self, layer: Layer, task: str, *, waits: bool = True) -> Iterator[WaitingBatch]:
        """The task's batches at the boundary before the layer, a word to the caller before each.

        Whether they will be asked for again at this boundary, `waits` says; it matters for the raw inputs alone.
        """
        source = self.waiting[task] if task in self.waiting else self._read(task, waits=waits)
        for batch in source:
            self.on_step(layer.index, task)
            yield batch

    def _read(self, task: str, *, waits: bool) -> Iterator[WaitingBatch]:
        """The task's batches at boundary 0, each read when it is asked for; both models start from the same inputs."""
        batches: list[WaitingBatch] = []
        for batch in self.samples[task]():
            inputs = on_device(batch.inputs, self.pool.device, self.pool.dtype)
            state, side = self.pool.chain.start(inputs)
            waiting = WaitingBatch(self.store, f"{self.tasks.index(task)}-{len(batches)}", side)
            for model in (_EXPERT, _MERGED):
                (waiting.put if waits else waiting.lend)(model, state)
            batches.append(waiting)
            yield waiting
        if not batches:
            raise DataError(
                f"task {task!r} has no calibration samples",
                hint="Give every task at least one, or leave the task out.",
                task=task,
            )
        self.waiting[task] = batches


def _require_tasks(pool: ModelPool, samples: Samples) -> None:
    if not samples:
        raise DataError("there is no task to calibrate on", hint="Give the calibration samples of a task.")
    missing = [task for task in samples if expert_of(task) not in pool]
    if missing:
        raise SpecError(
            f"there is no expert of {', '.join(sorted(missing))}",
            hint=f"The models are {', '.join(pool.names)}.",
        )
