"""Accuracy of every variant on the test split, with intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from driftlens.data.samples import SampleSet, few_of, part_of
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import forward, input_bytes, waiting_bytes
from driftlens.linalg.state import expert_cosine
from driftlens.metrics import ACCURACY, metric_called
from driftlens.models.chain import Pool
from driftlens.pipeline.analyze.answers import Answers, answer_scores, metrics_of
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter, TaskMeter
from driftlens.records.intervals import wilson
from driftlens.records.reading import estimate
from driftlens.records.run import DriftRun
from driftlens.records.scores import interval_of, results
from driftlens.variants import expert_of, title

CHUNK_BYTES = 256 << 20
"""Samples and features held while accuracy is measured; small enough to stay out of everything's way."""


@torch.no_grad()
def accuracies(study: Study, task: str, variants: list[str], reporter: Reporter) -> Answers:
    """One row of the accuracy table per variant, and whether each test sample is right; `expert` is the task's own.

    Raises:
        NumericsError: weights or features are NaN or infinite.
        Cancelled: somebody asked to stop.
    """
    samples = study.tasks[task].test
    if samples is None or samples.labels is None or ACCURACY.name not in metrics_of(study, task):
        return Answers()
    is_right = study.pool.chain.modality.is_right
    maps = {variant: study.head(task, variant) for variant in variants}
    one = samples.load([0])
    per_sample = input_bytes(one) + waiting_bytes(study.pool, expert_of(task), one)
    length = max(1, CHUNK_BYTES // max(1, per_sample) // samples.batch_size) * samples.batch_size
    hits: dict[str, list[float]] = {variant: [] for variant in variants}
    # Of every task as many as rows come of: none without a test split or a head.
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
                hits[variant] += is_right(head, features, labels).double().tolist()
    meter.finish()
    count, metric = len(samples), study.pool.chain.modality.metric
    found = Answers()
    for variant, right in hits.items():
        key = {"task": task, "variant": variant, "metric": metric}
        (low, high), value = wilson(int(sum(right)), count), sum(right) / count
        found.rows.append(
            {**key, "value": value, "n": count, "ci_low": low, "ci_high": high, "seed": study.seed}
        )
        found.results += [
            {**key, "sample_id": sample, "value": one} for sample, one in zip(samples.ids, right, strict=True)
        ]
    return found


def scores_of(study: Study, task: str, variants: list[str], reporter: Reporter) -> Answers:
    """What variants score on a task by all its metrics, accuracy among them; errors as for both."""
    found, others = (of(study, task, variants, reporter) for of in (accuracies, answer_scores))
    return Answers(found.rows + others.rows, found.results + others.results, others.notices)


@torch.no_grad()
def final_features(pool: ModelPool, model: str, task: str, samples: SampleSet, pooling: Pool) -> Tensor:
    """What leaves the last layer of one model, one vector per sample, [n, d].

    Raises:
        NumericsError: weights or features are NaN or infinite.
    """
    per_sample = waiting_bytes(pool, model, samples.load([0]))
    length = max(1, CHUNK_BYTES // max(1, per_sample) // samples.batch_size) * samples.batch_size
    parts = ((first, min(first + length, len(samples))) for first in range(0, len(samples), length))
    chunks = (forward(pool, model, samples.batches(*part), task=task, pooling=pooling) for part in parts)
    return torch.cat([found for chunk in chunks for _, found in chunk])


def final_drift(found: Tensor, expert: Tensor) -> dict[str, float]:
    """How far a model's final features [n, d] are from the expert's, by columns of the layer table's last row."""
    drift = torch.linalg.vector_norm(found - expert, dim=1).double()
    size = float(torch.linalg.vector_norm(expert, dim=1).double().sum())
    relative = float(drift.sum()) / size if size else math.nan
    cosine = float(expert_cosine(found, expert).double().nanmean())
    return {"drift_l2_mean": float(drift.mean()), "drift_rel": relative, "cos_mean": cosine}


@torch.no_grad()
def first_look(run: DriftRun, study: Study, variant: str, counts: Mapping[str, int]) -> str:
    """What a few diagnosis samples say of a new variant beside the merged model and the experts, in one sentence.

    It costs one forward pass of the new model on at most `counts` samples of each task, and its answers to as many test
    samples where these are scored: all else is in the run.

    Raises:
        NumericsError: weights or features are NaN or infinite.
        RunError: a table can't be read.
    """
    import pandas as pd

    drift, size, num_samples = dict.fromkeys(("merged", variant), 0.0), 0.0, 0
    scored: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for task, at_hand in study.tasks.items():
        samples = part_of(at_hand.diagnosis, range(min(counts[task], len(at_hand.diagnosis))))
        found = final_features(study.pool, variant, task, samples, study.settings.pool).cpu()
        features = run.features(task, "expert", "final")[: len(samples)].astype(np.float32)
        expert = torch.from_numpy(features).to(found)
        seen = run.samples(task, "merged", layer="final").set_index("sample_id").loc[list(samples.ids)]
        drift["merged"] += float(seen["drift_l2"].sum())
        drift[variant] += float(torch.linalg.vector_norm(found - expert, dim=1).sum())
        size += float(torch.linalg.vector_norm(expert, dim=1).sum())
        num_samples += len(samples)
        head, metric = study.head(task, variant), study.pool.chain.modality.metric
        if head is not None and samples.labels is not None:
            there = run.outputs(task, "merged").set_index("sample_id").loc[list(samples.ids)]
            hits = study.pool.chain.modality.is_right(head, found, samples.labels)
            right = {"merged": there["pred"] == there["label"], variant: hits.cpu().numpy()}
            right["expert"] = there["expert_pred"] == there["label"]
            rows = {name: pd.DataFrame({"value": hit, "reference": np.nan}) for name, hit in right.items()}
        elif at_hand.test is not None and (asked := metrics_of(study, task)):
            metric = asked[0]
            few = few_of(at_hand.test, counts[task])
            part = dataclasses.replace(at_hand, test=few, metrics=asked[:1])
            of_few = dataclasses.replace(study, tasks={task: part})
            rows = {name: results(run, task, name, metric_called(metric)) for name in ("merged", "expert")}
            rows = {name: own[own.index.isin(few.ids)] for name, own in rows.items()}
            rows[variant] = pd.DataFrame(answer_scores(of_few, task, [variant], Reporter()).results)
        else:
            continue
        for name in ("merged", variant, "expert") if all(map(len, rows.values())) else ():
            scored.setdefault((metric, name), []).append(rows[name][["value", "reference"]].astype(float))
    said = f"first look, {num_samples} samples of {len(study.tasks)} tasks: relative drift "
    said += (
        ", ".join(f"{title(name)} {value / size:.3f}" for name, value in drift.items())
        if size
        else "undefined"
    )
    for metric in dict.fromkeys(metric for metric, _ in scored):
        of = metric_called(metric)
        pairs = {at: pd.concat(own) for (one, at), own in scored.items() if one == metric}
        ends = {name: interval_of(of, *pair.to_numpy().T) for name, pair in pairs.items()}
        told = (f"{title(name)} {estimate(end, of.kind)}" for name, end in ends.items())
        said += f"; {of.title} with 95 % interval (n = {ends[variant].n}) {', '.join(told)}"
    return said
