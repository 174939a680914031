"""Accuracy of every variant on the test split, with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftlens.data.samples import SampleSet
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import forward, input_bytes, waiting_bytes
from driftlens.linalg.state import expert_cosine
from driftlens.metrics import ACCURACY
from driftlens.models.chain import Pool
from driftlens.pipeline.analyze.answers import metrics_of
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter, TaskMeter
from driftlens.records.intervals import wilson
from driftlens.records.run import DriftRun
from driftlens.variants import expert_of, title

CHUNK_BYTES = 256 << 20
"""Samples and features held while accuracy is measured; small enough to stay out of everything's way."""


@torch.no_grad()
def accuracy_rows(
    study: Study, task: str, variants: list[str], reporter: Reporter
) -> list[dict[str, object]]:
    """One row of the accuracy table per variant; `expert` is the task's own.

    Raises:
        NumericsError: weights or features are NaN or infinite.
        Cancelled: somebody asked to stop.
    """
    at_hand = study.tasks[task]
    if at_hand.test is None or at_hand.test.labels is None or ACCURACY.name not in metrics_of(study, task):
        return []
    hits = _hits(study, task, variants, at_hand.test, reporter)
    count = len(at_hand.test)
    return [
        {
            "task": task,
            "variant": variant,
            "metric": study.pool.chain.modality.metric,
            "value": right / count,
            "n": count,
            "ci_low": low,
            "ci_high": high,
            "seed": study.seed,
        }
        for variant, right in hits.items()
        for low, high in [wilson(right, count)]
    ]


def _hits(
    study: Study, task: str, variants: list[str], samples: SampleSet, reporter: Reporter
) -> dict[str, int]:
    """Samples that each variant gets right; a sample is read once for all of them."""
    assert samples.labels is not None
    is_right = study.pool.chain.modality.is_right
    maps = {variant: study.head(task, variant) for variant in variants}
    one = samples.load([0])
    per_sample = input_bytes(one) + waiting_bytes(study.pool, expert_of(task), one)
    length = max(1, CHUNK_BYTES // max(1, per_sample) // samples.batch_size) * samples.batch_size
    hits = dict.fromkeys(variants, 0)
    # As many rows as `accuracy_rows` makes: none without a test split or a head.
    units = {
        name: len(variants) * len(at.test) if at.test and ACCURACY.name in metrics_of(study, name) else 0
        for name, at in study.tasks.items()
    }
    meter, done = TaskMeter(reporter, "evaluate", units, task), 0
    for first in range(0, len(samples), length):
        chunk = list(samples.batches(first, min(first + length, len(samples))))
        for variant in variants:
            meter.step(done, variant)
            done += sum(batch.stop - batch.start for batch in chunk)
            model = expert_of(task) if variant == "expert" else variant
            # Scores are of one vector per sample, as in the output table: of tokens they would be of no class.
            for start, features in forward(study.pool, model, chunk, task=task, pooling=study.settings.pool):
                head = maps[variant]
                assert head is not None
                labels = samples.labels[start : start + len(features)]
                hits[variant] += int(is_right(head, features, labels).sum())
    meter.finish()
    return hits


@torch.no_grad()
def final_features(pool: ModelPool, model: str, task: str, samples: SampleSet, pooling: Pool) -> Tensor:
    """What leaves the last layer of one model, one vector per sample, [n, d].

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    return torch.cat(list(_by_batch(pool, model, task, samples, pooling)))


def _by_batch(pool: ModelPool, model: str, task: str, samples: SampleSet, pooling: Pool) -> Iterator[Tensor]:
    per_sample = waiting_bytes(pool, model, samples.load([0]))
    length = max(1, CHUNK_BYTES // max(1, per_sample) // samples.batch_size) * samples.batch_size
    for first in range(0, len(samples), length):
        chunk = samples.batches(first, min(first + length, len(samples)))
        yield from (found for _, found in forward(pool, model, chunk, task=task, pooling=pooling))


@dataclass(frozen=True)
class FinalDrift:
    """How far a model's final features are from the expert's; the columns of the layer table's last row.

    Attributes:
        drift_l2_mean: mean norm of the difference.
        drift_rel: sum of these norms against the sum of the expert's feature norms.
        cos_mean: mean cosine to the expert's feature, over samples that have one.
    """

    drift_l2_mean: float
    drift_rel: float
    cos_mean: float

    @classmethod
    def between(cls, found: Tensor, expert: Tensor) -> FinalDrift:
        """From the final features of a model and of the expert, [n, d] each, on the same samples."""
        drift = torch.linalg.vector_norm(found - expert, dim=1).double()
        size = float(torch.linalg.vector_norm(expert, dim=1).double().sum())
        relative = float(drift.sum()) / size if size else math.nan
        return cls(float(drift.mean()), relative, float(expert_cosine(found, expert).double().nanmean()))


@torch.no_grad()
def first_look(run: DriftRun, study: Study, variant: str, counts: Mapping[str, int]) -> str:
    """What a few diagnosis samples say of a new variant beside the merged model and the experts, in one sentence.

    It costs one forward pass of the new model on at most `counts` samples of each task: all else is in the run.

    Raises:
        NumericsError: weights or features are NaN or infinite.
        RunError: a table can't be read.
    """
    drift, right = dict.fromkeys(("merged", variant), 0.0), dict.fromkeys(("merged", variant, "expert"), 0)
    size, num_samples, num_labelled = 0.0, 0, 0
    for task, at_hand in study.tasks.items():
        whole = at_hand.diagnosis
        few = slice(0, min(counts[task], len(whole)))
        labels = whole.labels[few] if whole.labels is not None else None
        samples = dataclasses.replace(whole, ids=whole.ids[few], labels=labels)
        found = final_features(study.pool, variant, task, samples, study.settings.pool).cpu()
        expert = torch.from_numpy(run.features(task, "expert", "final")[few].astype(np.float32)).to(found)
        seen = run.samples(task, "merged", layer="final").set_index("sample_id").loc[list(samples.ids)]
        drift["merged"] += float(seen["drift_l2"].sum())
        drift[variant] += float(torch.linalg.vector_norm(found - expert, dim=1).sum())
        size += float(torch.linalg.vector_norm(expert, dim=1).sum())
        num_samples += len(samples)
        head = study.head(task, variant)
        if head is None or labels is None:
            continue
        there = run.outputs(task, "merged").set_index("sample_id").loc[list(samples.ids)]
        right["merged"] += int((there["pred"] == there["label"]).sum())
        right["expert"] += int((there["expert_pred"] == there["label"]).sum())
        right[variant] += int(study.pool.chain.modality.is_right(head, found, labels).sum())
        num_labelled += len(labels)
    said = f"first look, {num_samples} samples of {len(study.tasks)} tasks: relative drift "
    said += (
        ", ".join(f"{title(name)} {value / size:.3f}" for name, value in drift.items())
        if size
        else "undefined"
    )
    if not num_labelled:
        return said
    intervals = {name: (count / num_labelled, *wilson(count, num_labelled)) for name, count in right.items()}
    scores = (f"{title(name)} {v:.1%} [{low:.1%}, {high:.1%}]" for name, (v, low, high) in intervals.items())
    return f"{said}; accuracy with 95 % interval (n = {num_labelled}) {', '.join(scores)}"
