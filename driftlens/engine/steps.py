"""The walk that calibrates step by step: q, k, v, then out, fc1 and fc2 of a block, each on what the others now give.

What a site should give is the expert's own output and, where its output is added to a stream of features, what that
stream lacks of the expert's: both move what leaves the sum to where the expert has it. Which stream that is, a forward
pass shows: h where a later module or the boundary reads h + y. It is found in pre-norm and post-norm blocks alike;
where an output is scaled or normalised before it is added (LayerScale, Gemma's second norms, batch norms of ResNets),
there is no such sum and the term drops out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from driftlens.data.samples import Batch
from driftlens.engine.exactness import exact_products
from driftlens.engine.layer_sums import require_rule, solve_layer, stacked
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import CalibratedLayer, SiteReport, StepProblem, Stepwise
from driftlens.engine.site_rows import rows_and_output
from driftlens.engine.step_weights import NUM_PASSES, ExpertGradients, Group, Weighted, groups_of, row_counts
from driftlens.engine.waiting import FeatureStore, WaitingBatch, read_batches
from driftlens.engine.walk import FiniteWatch
from driftlens.errors import DataError
from driftlens.linalg.joint_ridge import BIAS_INPUT, JointMoments
from driftlens.models.chain import Layer, Parameters, Pool, SideInputs, State
from driftlens.variants import expert_of

_EXPERT, _STUDENT = "expert", "merged"
_ROWS = 64
_ENTERED = ""
"""Stands for what enters a block, among the streams that are added to."""


@dataclass
class _Piece:
    """One batch, and of its samples the digests and the folds."""

    batch: WaitingBatch
    digests: tuple[str, ...]
    folds: Tensor


@dataclass
class StepWalk:
    """What stays the same from layer to layer, and the features that wait at the boundary reached.

    Arguments are those of `driftlens.engine.forward_order.calibrate`.
    """

    pool: ModelPool
    samples: Mapping[str, Callable[[], Iterable[Batch]]]
    calibrator: Stepwise
    sites: Mapping[int, Collection[str]]
    store: FeatureStore
    merged: str
    base: str | None
    on_step: Callable[[int, str], None]
    pooling: Pool
    ids: Mapping[str, Sequence[str]]
    pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    weighted: dict[str, dict[tuple[int, int], Weighted]] = field(default_factory=dict)

    def layers(self, done: Mapping[int, Mapping[str, Tensor]]) -> Iterator[CalibratedLayer]:
        """Calibrated layers in forward order; those of `done` are applied."""
        last = max((index for index in self.sites if index not in done), default=0)
        groups = {
            layer.index: found
            for layer in self.pool.chain.layers[:last]
            if layer.index not in done and (found := groups_of(layer, self.sites.get(layer.index, ())))
        }
        for index, mine in groups.items():
            for group in mine:
                require_rule(self.pool.chain, group.sites[0].token_weights)
            last = index
        with self.store:
            self._read()
            for layer in self.pool.chain.layers[: last if groups else 0]:
                if layer.index in groups:
                    if self.calibrator.weights == "gradient" and not self.weighted:
                        self._weigh_by_gradients(groups)
                    yield self._calibrate(layer, groups[layer.index], is_last=layer.index == last)
                else:
                    self._pass(layer, done.get(layer.index, {}))

    @torch.no_grad()
    def _read(self) -> None:
        """All batches at boundary 0, and folds by content: equal samples in one, whatever their order."""
        folds = self.calibrator.num_folds
        for number, task in enumerate(sorted(self.samples)):
            named: list[tuple[str, ...]] = []

            def reading(task: str = task, named: list[tuple[str, ...]] = named) -> Iterator[Batch]:
                for batch in self.samples[task]():
                    named.append(batch.digests)
                    yield batch

            batches = list(read_batches(self.pool, reading(), self.store, f"{number}", (_EXPERT, _STUDENT)))
            rank = {digest: at for at, digest in enumerate(sorted({d for names in named for d in names}))}
            if not rank:
                raise DataError(
                    f"task {task!r} has no calibration samples",
                    hint="Give every task at least one, or leave the task out.",
                    task=task,
                )
            if len(rank) < folds:
                raise DataError(
                    f"task {task!r} has {len(rank)} different calibration samples, which {folds} folds can't share",
                    hint=f"Bring more samples, or set folds to at most {len(rank)}; cv=off needs one sample.",
                    task=task,
                )
            self.pieces[task] = [
                _Piece(
                    batch,
                    names,
                    torch.tensor([rank[name] % folds for name in names], device=self.pool.device),
                )
                for batch, names in zip(batches, named, strict=True)
            ]

    @torch.no_grad()
    @exact_products()
    def _pass(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Take all features to the next boundary."""
        student = self.pool.parameters(self.merged, layer)
        self._advance(layer, student | {name: value.to(student[name]) for name, value in done.items()})

    @torch.no_grad()
    @exact_products()
    def _weigh_by_gradients(self, groups: Mapping[int, Sequence[Group]]) -> None:
        gradients = ExpertGradients(
            self.pool, self.pooling, groups, metric=self.calibrator.mu > 0, on_step=self.on_step
        )
        for task, pieces in self.pieces.items():
            draws = [self._draws(piece.digests) for piece in pieces]
            self.weighted[task] = gradients.weigh(task, [piece.batch for piece in pieces], draws, _EXPERT)

    def _draws(self, digests: Sequence[str]) -> Callable[[int], Tensor]:
        def draw(width: int) -> Tensor:
            rows = []
            for digest in digests:
                generator = torch.Generator().manual_seed(
                    (int(digest[:15], 16) + self.calibrator.seed) % 2**63
                )
                rows.append(torch.randn(NUM_PASSES, width, generator=generator, dtype=torch.float64))
            return torch.stack(rows, dim=1).to(self.pool.dtype).to(self.pool.device)

        return draw

    @torch.no_grad()
    def _weigh_alike(self, layer: Layer, groups: Sequence[Group]) -> None:
        wanted = {group.sites[0].name for group in groups}
        for task, pieces in self.pieces.items():
            parameters = self.pool.parameters(expert_of(task), layer)
            counts: list[list[Tensor]] = [[] for _ in groups]
            for piece in pieces:
                state, side = piece.batch.get(_EXPERT), piece.batch.side
                seen, _ = rows_and_output(layer, parameters, state, side, (), wanted, stops=True)
                for at, group in enumerate(groups):
                    y = seen.outputs[group.sites[0].name]
                    counts[at].append(row_counts(self.pool.chain, layer, group.sites[0], y, state, side))
            mine = self.weighted.setdefault(task, {})
            mine |= {(layer.index, at): Weighted.of(found, None) for at, found in enumerate(counts)}

    @torch.no_grad()
    @exact_products()
    def _calibrate(self, layer: Layer, groups: Sequence[Group], *, is_last: bool) -> CalibratedLayer:
        started = time.perf_counter()
        student = self.pool.parameters(self.merged, layer)
        if self.calibrator.weights == "uniform":
            self._weigh_alike(layer, groups)
        streams = self._streams(layer, student, groups) if self.calibrator.residual else {}
        merged, updates = dict(student), dict[str, Tensor]()
        reports: list[SiteReport] = []
        stored_as = self.merged if self.base is None else self.base
        numbered = list(enumerate(groups))
        for step in [numbered] if self.calibrator.order == "block" else [[one] for one in numbered]:
            problems = [self._problem(layer, student, merged, at, group, streams) for at, group in step]
            found, said = solve_layer(self.pool, layer, problems, self.calibrator, stored_as=stored_as)
            student |= found
            updates |= found
            reports += said
        drift = {} if is_last else self._advance(layer, student)
        return CalibratedLayer(layer.index, updates, reports, drift, time.perf_counter() - started)

    def _problem(
        self,
        layer: Layer,
        student: Parameters,
        merged: Parameters,
        at: int,
        group: Group,
        streams: Mapping[str, str],
    ) -> StepProblem:
        """Moments of one group of all tasks; their Gram matrices are brought to mean norm 1."""
        dtype: torch.dtype = getattr(torch, self.calibrator.solve_dtype)
        weight = stacked(merged, group.sites)
        outputs, width = weight.shape
        like = torch.zeros((), dtype=dtype, device=self.pool.device)
        empty = JointMoments.zeros(outputs, width + group.has_bias, like)
        folds = [empty.scaled(1.0) for _ in range(self.calibrator.num_folds)]
        weights = {task: mine[layer.index, at] for task, mine in self.weighted.items()}
        energy = sum(found.energy for found in weights.values()) / len(weights)
        tasks: list[tuple[Tensor, JointMoments]] = []
        norms: list[Tensor] = []
        factors: list[float] = []
        for task, weighted in weights.items():
            expert = self.pool.parameters(expert_of(task), layer)
            factors.append(weighted.energy / energy if energy > 0 else 1.0)
            whole = empty.scaled(1.0)
            rows = _Rows(layer, group, streams, student, merged, expert)
            for piece, count in zip(self.pieces[task], weighted.rows, strict=True):
                self.on_step(layer.index, task)
                x, local, upstream = rows.of(piece.batch)
                fold = piece.folds.repeat_interleave(len(x) // len(piece.folds))
                for number in range(len(folds)):
                    mine = slice(None) if len(folds) == 1 else (fold == number).nonzero()[:, 0]
                    moments = _moments(x[mine], local[mine], upstream[mine], count[mine])
                    folds[number].add(moments, factors[-1])
                    whole.gram.add_(moments.gram) if not self.calibrator.mu else whole.add(moments)
            norms.append(torch.linalg.matrix_norm(whole.gram[:width, :width]))
            if self.calibrator.mu:
                tasks.append((self._metric(weighted, like), whole))
        # Where no input ever varies from 0 there is nothing to bring to norm 1.
        scale = 1 / torch.stack(norms).mean() if sum(norms) > 0 else like + 1
        for moments in folds:
            for value in vars(moments).values():
                value.mul_(scale)
        tasks = [
            (metric, whole.scaled(scale * factor))
            for (metric, whole), factor in zip(tasks, factors, strict=False)
        ]
        mine_merged = {
            name: merged[name]
            for site in group.sites
            for part in ("weight", "bias")
            if (name := f"{site.name}.{part}") in merged
        }
        return StepProblem(
            group.sites, folds, tasks, group.has_bias, mine_merged, float(scale) * sum(factors)
        )

    def _metric(self, weighted: Weighted, like: Tensor) -> Tensor:
        moment, mu = weighted.metric.to(like), self.calibrator.mu
        eye = torch.eye(len(moment), dtype=like.dtype, device=like.device)
        trace = moment.trace()
        return (1 - mu) * eye + mu * (len(moment) * moment / trace if bool(trace > 0) else eye)

    def _streams(self, layer: Layer, merged: Parameters, groups: Sequence[Group]) -> dict[str, str]:
        """See `added_to`."""
        batch = next(iter(self.pieces.values()))[0].batch
        return added_to(layer, merged, batch.get(_STUDENT), batch.side, groups)

    def _advance(self, layer: Layer, student: Parameters) -> dict[str, float]:
        """Take all features through the layer; the mean drift behind it, by task."""
        drift: dict[str, float] = {}
        for task, pieces in self.pieces.items():
            expert = self.pool.parameters(expert_of(task), layer)
            watch = FiniteWatch(layer, task, self.ids.get(task, ()))
            sizes = []
            for piece in pieces:
                self.on_step(layer.index, task)
                batch, vectors = piece.batch, []
                for name, words, parameters in (
                    (_EXPERT, "the expert", expert),
                    (_STUDENT, "the calibrated model", student),
                ):
                    out = layer.call(parameters, batch.get(name), batch.side)
                    watch.see(words, out[layer.stream])
                    batch.put(name, out)
                    vectors.append(layer.vectors(out, batch.side, self.pooling))
                sizes.append(torch.linalg.vector_norm((vectors[1] - vectors[0]).double(), dim=1))
            watch.check()
            drift[task] = float(torch.cat(sizes).mean())
        return drift


@dataclass
class _Rows:
    """What one group of sites is fed, and what it lacks of its targets, batch by batch of one task."""

    layer: Layer
    group: Group
    streams: Mapping[str, str]
    student: Parameters
    merged: Parameters
    expert: Parameters

    def __post_init__(self) -> None:
        self._own, self._theirs = (self._affine(parameters) for parameters in (self.merged, self.expert))

    def _affine(self, parameters: Parameters) -> Tensor:
        """The stacked weights, the biases in a column for the constant input."""
        weight = stacked(parameters, self.group.sites)
        if not self.group.has_bias:
            return weight
        bias = torch.cat([parameters[f"{site.name}.bias"] for site in self.group.sites])
        return torch.cat([weight, bias[:, None] / BIAS_INPUT], dim=1)

    def of(self, batch: WaitingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs x~ [T, k], y0 - W_m x - b_m and y1 - y0, [T, o] each."""
        names = [site.name for site in self.group.sites]
        streams = {name: self.streams[name] for name in names if name in self.streams}
        tapped = {stream for stream in streams.values() if stream != _ENTERED}
        mine, theirs = batch.get(_STUDENT), batch.get(_EXPERT)
        seen, _ = rows_and_output(self.layer, self.student, mine, batch.side, {names[0], *tapped}, stops=True)
        expert, _ = rows_and_output(self.layer, self.expert, theirs, batch.side, tapped, names, stops=True)
        x = seen.inputs[names[0]]
        x = x.reshape(-1, x.shape[-1])
        if self.group.has_bias:
            x = torch.cat([x, x.new_full((len(x), 1), BIAS_INPUT)], dim=1)
        wanted = []
        for name in names:
            y = expert.outputs[name]
            if name in streams:
                key, stream = streams[name], self.layer.stream
                entered = (theirs[stream], mine[stream]) if key == _ENTERED else None
                there, here = entered or (expert.inputs[key], seen.inputs[key])
                y = y + (there - here)
            wanted.append(y.reshape(len(x), -1))
        target = x @ self._theirs.mT
        return x, x @ (self._theirs - self._own).mT, torch.cat(wanted, dim=1) - target


def _moments(x: Tensor, local: Tensor, upstream: Tensor, weights: Tensor) -> JointMoments:
    counted = x * weights[:, None]
    both = torch.cat([local, upstream], dim=1).mT @ counted
    energy = weights @ (local + upstream).square().sum(dim=1)
    return JointMoments(counted.mT @ x, both[: local.shape[1]], both[local.shape[1] :], energy)


def added_to(
    layer: Layer, parameters: Parameters, state: State, side: SideInputs, groups: Sequence[Group]
) -> dict[str, str]:
    """Site -> the module whose input h its output y is added to, `""` for what enters the layer.

    Found by running the layer once: a later module reads h + y, or the layer returns it. Sites without such a sum are
    left out.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    wanted = {site.name for group in groups for site in group.sites}

    def tap(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
        inputs[site] = x
        return (lambda y: outputs.__setitem__(site, y)) if site in wanted else None

    out = layer.call(parameters, state, side, tap)
    sums = [*inputs.values(), out[layer.stream]]
    entered = {_ENTERED: state[layer.stream]} if layer.stream in state else {}
    found = {}
    for site, y in outputs.items():
        for name, h in (entered | inputs).items():
            if h.shape == y.shape and any(z.shape == y.shape and _is_sum(z, h, y) for z in sums):
                found[site] = name
                break
    return found


def _is_sum(z: Tensor, h: Tensor, y: Tensor) -> bool:
    """Whether z = h + y where it isn't padding, and y counts."""
    few = slice(1 if z.dim() > 2 else _ROWS)  # the first sample says it
    z, h, y = z[few], h[few], y[few]
    real = (z != 0).any(dim=-1)
    z, h, y = z[real], h[real], y[real]
    gap, size = torch.linalg.vector_norm(z - h - y), torch.linalg.vector_norm(y)
    return bool(gap <= 1e-3 * size) and bool(size > 0)
