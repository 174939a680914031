"""Scores of every variant on the test samples: accuracy by classes, and metrics of answers. Entry: `score_variants`."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from driftlens.data.samples import SampleSet, order_by_length, select_samples
from driftlens.data.task_data import parse_number
from driftlens.engine.pool import ModelPool, input_bytes
from driftlens.engine.walk import iter_final_features, sample_cache_bytes
from driftlens.experiment.study import Study
from driftlens.linalg.state import DEEPEST, RANKINGS, embedding_similarity, expert_cosine, row_norms
from driftlens.models.chain import Pool
from driftlens.models.heads import has_one_score, is_vocabulary_head
from driftlens.models.texts import (
    TextProcessor,
    TextSample,
    generate,
    generate_with_likelihoods,
    log_likelihoods,
)
from driftlens.results.measures import metric_interval
from driftlens.utils.devices import to_float64
from driftlens.utils.distributed import ProgressReporter, TaskProgress
from driftlens.utils.errors import DataError
from driftlens.utils.intervals import standard_error, t_quantile
from driftlens.utils.variants import ACCURACY, METRICS, expert_name, metric_by_name

# Bytes of samples and features in memory while accuracy is measured.
CHUNK_BYTES = 256 << 20
# Tokens that an answer may exceed the longest target by, so that a longer answer is not cut to an equal one.
SPARE_TOKENS = 8
# Metrics of generated answers.
GENERATING = frozenset({"exact_match", "spearman"})
# Characters of a passage that are stored with a score.
_SHOWN = 300
# Texts whose features are in memory together.
_AT_ONCE = 4096
# Diagnosis samples per task on which the confidence of its expert is measured, at most.
_MAX_CONFIDENCE_SAMPLES = 200

# Per sample: value and reference as in the table `scores`, then answer and target of texts.
_Rows = list[tuple[Any, ...]]
# Rows by variant and metric.
_Results = dict[tuple[str, str], _Rows]


@dataclass
class TaskResults:
    """Results of one task: table rows by table name, pooled features, warnings and notices.

    Features are [n, d] in float32 by (variant, layer), with `expert` as a variant.
    """

    tables: defaultdict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    features: dict[tuple[str, int], NDArray[np.float32]] = field(default_factory=dict)
    precision_error: float = math.nan
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def score_variants(study: Study, task: str, variants: Sequence[str], reporter: ProgressReporter) -> TaskResults:
    """Score variants on a task's test samples by all metrics of the task.

    Args:
        study: the opened models and samples.
        task: whose test samples are read.
        variants: names in the study's pool; `expert` means the task's expert.
        reporter: receives progress.
    """
    scores, samples = TaskResults(), study.tasks[task].test
    if samples is None:
        return scores
    order = order_by_length(samples)
    data = dataclasses.replace(study.tasks[task], test=select_samples(samples, order))
    study = dataclasses.replace(study, tasks={**study.tasks, task: data})
    results = correct_predictions(study, task, variants, reporter) | _score_answers(
        study, task, variants, reporter, scores.notices
    )
    for (variant, name), ordered in results.items():
        rows = [row for _, row in sorted(zip(order, ordered, strict=True), key=itemgetter(0))]
        values, references = (
            np.array([row[column] if column < len(row) else None for row in rows], dtype=float) for column in (0, 1)
        )
        score = metric_interval(metric_by_name(name), values, references)
        key = {"task": task, "variant": variant, "metric": name}
        ends = {"ci_low": score.low, "ci_high": score.high}
        columns = ("value", "reference", "answer", "target")[: len(rows[0])]
        scores.tables["scores"] += [
            {**key, "sample_id": sample, **dict(zip(columns, row, strict=True))}
            for sample, row in zip(samples.ids, rows, strict=True)
        ]
        scores.tables["accuracy"].append({**key, "value": score.value, "n": score.n, **ends, "seed": study.seed})
    return scores


def _task_metrics(study: Study, task: str) -> tuple[str, ...]:
    """Return the metrics of a task: those of its data entry, else chosen by the kind of answers."""
    data = study.tasks[task]
    if data.metrics or (test := data.test) is None:
        return data.metrics
    if test.labels is not None and data.head is not None and not is_vocabulary_head(data.head):
        return (ACCURACY.name,)
    texts = test.texts
    if texts is not None and texts.compared is not None:
        needs = "number" if texts.compared.passages is None else "passages"
        return tuple(name for name, metric in METRICS.items() if metric.needs == needs)
    if texts is None or texts.reader is None or texts.reader.form == "encoder" or not test.text(0).target:
        return ()
    return ("choice",) if data.choices else ("exact_match",)


@torch.no_grad()
def correct_predictions(study: Study, task: str, variants: Sequence[str], reporter: ProgressReporter) -> _Results:
    """Return per variant which predictions on the labelled test samples of a task are correct."""
    samples = study.tasks[task].test
    if samples is None or samples.labels is None or ACCURACY.name not in _task_metrics(study, task):
        return {}
    modality = study.pool.chain.modality
    results: _Results = {(variant, modality.metric): [] for variant in variants}
    sample = samples.load([0])
    per_sample = input_bytes(sample) + sample_cache_bytes(study.pool, expert_name(task), sample)
    length = samples.num_in_budget(per_sample, CHUNK_BYTES)
    # Tasks without a test split or a head add nothing to the total.
    units = {
        name: len(variants) * len(data.test) if data.test and ACCURACY.name in _task_metrics(study, name) else 0
        for name, data in study.tasks.items()
    }
    meter, done = TaskProgress(reporter, "evaluate", units, task), 0
    # Chunks in the outer loop, so that samples are read once for all variants.
    for offset in range(0, len(samples), length):
        chunk = list(samples.batches(offset, min(offset + length, len(samples))))
        for variant in variants:
            meter.step(done, variant)
            done += sum(batch.stop - batch.start for batch in chunk)
            model, head = _model_name_in_pool(variant, task), study.head(task, variant)
            assert head is not None
            # One vector per sample, as in the output table.
            for start, features in iter_final_features(
                study.pool, model, chunk, task=task, pooling=study.settings.pool
            ):
                labels = samples.labels[start : start + len(features)]
                hits = modality.is_right(head, features, labels).cpu().double().tolist()
                results[variant, modality.metric] += [(hit,) for hit in hits]
    meter.finish()
    return results


def _model_name_in_pool(variant: str, task: str) -> str:
    return expert_name(task) if variant == "expert" else variant


@torch.no_grad()
def final_features(pool: ModelPool, model: str, task: str, samples: SampleSet, pooling: Pool) -> Tensor:
    """Return the final features [n, d] of one model.

    Args:
        pool: the models.
        model: name in the pool.
        task: whose adapters are attached.
        samples: the samples to read.
        pooling: how tokens are pooled.
    """
    length = samples.num_in_budget(sample_cache_bytes(pool, model, samples.load([0])), CHUNK_BYTES)
    parts = ((start, min(start + length, len(samples))) for start in range(0, len(samples), length))
    chunks = (iter_final_features(pool, model, samples.batches(*part), task=task, pooling=pooling) for part in parts)
    return torch.cat([features for chunk in chunks for _, features in chunk])


def final_drift_columns(features: Tensor, expert: Tensor) -> dict[str, float]:
    """Return mean drift, relative drift and cosine of final features [n, d], as table columns."""
    drift = to_float64(row_norms(features - expert))
    size = float(to_float64(row_norms(expert)).sum())
    relative = float(drift.sum()) / size if size else math.nan
    cosine = float(to_float64(expert_cosine(features, expert)).nanmean())
    return {"drift_l2_mean": float(drift.mean()), "drift_rel": relative, "cos_mean": cosine}


@torch.no_grad()
def _score_answers(
    study: Study, task: str, variants: Sequence[str], reporter: ProgressReporter, notices: list[str]
) -> _Results:
    """Score generated answers by each metric; add a notice if `compute.feature_budget` is exceeded."""
    results: _Results = {}
    samples = study.tasks[task].test
    metrics = [name for name in _task_metrics(study, task) if name != ACCURACY.name]
    if samples is None or not metrics:
        return results
    if samples.texts is not None and samples.texts.compared is not None:
        return _score_embeddings(study, task, variants, reporter)
    test = _TestTexts.from_samples(samples, study.tasks[task].choices, metrics)
    total, at_once = len(variants) * len(samples), samples.safe_batch_size
    scored = has_one_score(study.tasks[task].head)
    for place, variant in enumerate(variants):
        model = _model_name_in_pool(variant, task)
        try:
            if not scored:
                study.pool.require_memory(model)
        except DataError as error:
            reason = f"{error.message}. {error.hint}"
            notices.append(f"{task}: {', '.join(metrics)} of {variant} not measured: {reason}")
            continue
        rows: dict[str, _Rows] = {name: [] for name in metrics}
        one_score = partial(_scalar_head_scores, study, task, variant, samples, test.reader)
        # A model with one score runs layer by layer; generation needs the whole model in memory.
        with nullcontext(one_score) if scored else study.pool.load_module(model, task) as module:
            for start in range(0, len(samples), at_once):
                done = place * len(samples) + start
                reporter.step("answer", done, total, f"task {task}: {variant}")
                batch = _TextBatch(test, module, range(start, min(start + at_once, len(samples))))
                for name in metrics:
                    rows[name] += _MEASURES[name](batch)
        results |= {(variant, name): of_metric for name, of_metric in rows.items()}
    reporter.step("answer", total, total, f"task {task}")
    return results


def _score_embeddings(study: Study, task: str, variants: Sequence[str], reporter: ProgressReporter) -> _Results:
    """Score text embeddings: similarity to pairs, or ranking of passages, by each metric."""
    results: _Results = {}
    samples, metrics = study.tasks[task].test, _task_metrics(study, task)
    assert samples is not None and samples.texts is not None and samples.texts.compared is not None
    comparison, passages = samples.texts.compared, samples.texts.compared.passages
    texts = [samples.text(position) for position in range(len(samples))]
    relations = [comparison.of(position) for position in range(len(samples))]
    others = [relation.pair for relation in relations] if passages is None else passages.texts
    for place, variant in enumerate(variants):
        reporter.step("answer", place * len(samples), len(variants) * len(samples), f"task {task}: {variant}")
        embed = partial(_text_features, study, _model_name_in_pool(variant, task), samples)
        queries = embed(samples.texts.reader, [TextSample(text.input) for text in texts])
        embedded = embed(comparison.reader, [TextSample(text) for text in others])
        if passages is None:
            alike = embedding_similarity(queries, embedded, comparison.similarity, paired=True).tolist()
            results[variant, "spearman"] = [
                (similarity, float(text.target), None, text.target.strip())
                for similarity, text in zip(alike, texts, strict=True)
            ]
            continue
        for name in metrics:
            results[variant, name] = []
        for query, relation in zip(queries, relations, strict=True):
            candidates, answers = passages.candidates(relation), passages.positives(relation)
            scores = embedding_similarity(query[None], embedded, comparison.similarity)[0][candidates]
            # Stable, so that equal scores keep the order of the passages.
            order = scores.argsort(descending=True, stable=True)[:DEEPEST].tolist()
            ranked = [candidates[rank] for rank in order]
            best = passages.texts[ranked[0]][:_SHOWN] if ranked else None
            for name in metrics:
                score = RANKINGS[name]([place in answers for place in ranked], len(answers))
                results[variant, name].append((score, None, best, relation.positive[0][:_SHOWN]))
    reporter.step("answer", len(variants) * len(samples), len(variants) * len(samples), f"task {task}")
    return results


def _text_features(
    study: Study, model: str, samples: SampleSet, reader: TextProcessor | None, texts: Sequence[TextSample]
) -> Tensor:
    """Return final features [n, d] of texts attached to a task's samples."""
    assert reader is not None
    # By length, so that batches hold little padding.
    unique = sorted(dict.fromkeys(texts), key=lambda text: sum(map(len, text)))
    samples_of_texts = dataclasses.replace(
        samples,
        ids=tuple(map(str, range(len(unique)))),
        labels=None,
        texts=None,
        load=lambda positions: reader([unique[position] for position in positions]),
    )
    features = final_features(study.pool, model, samples.task, samples_of_texts, study.settings.pool)
    place = {text: index for index, text in enumerate(unique)}
    return features[[place[text] for text in texts]]


@dataclass(frozen=True)
class _TestTexts:
    """Prompts and target answers of a task's test samples."""

    texts: list[TextSample]
    labels: tuple[str, ...] | None
    reader: TextProcessor
    choices: Mapping[str, str]
    new_tokens: int
    numbers: list[float]
    metrics: Sequence[str]

    @classmethod
    def from_samples(cls, samples: SampleSet, choices: Mapping[str, str], metrics: Sequence[str]) -> _TestTexts:
        """Collect prompts and targets of test samples; refuse missing or non-numeric targets."""
        assert samples.texts is not None and samples.texts.reader is not None
        texts, reader = samples.all_texts, samples.texts.reader
        bare = [name for name, text in zip(samples.ids, texts, strict=True) if not text.target]
        if bare:
            raise DataError(
                f"task {samples.task}: test sample {bare[0]} has no target",
                hint="Add a target, or remove the sample.",
            )
        numbers = []
        for name, text in zip(samples.ids, texts, strict=True) if "spearman" in metrics else ():
            numbers.append(parse_number(text.target))
            if math.isnan(numbers[-1]):
                raise DataError(
                    f"task {samples.task}: the target of test sample {name}, {text.target!r}, is not a number",
                    hint=f"spearman ranks numbers. Correct the target, or set another data.{samples.task}.metric.",
                )
        longest = max(len(reader.answer_tokens(text.target)) for text in texts)
        return cls(texts, samples.labels, reader, choices, longest + SPARE_TOKENS, numbers, metrics)


@dataclass
class _TextBatch:
    """Some test texts of a task, and what a model makes of them, each computed once.

    Attributes:
        test: the task's test texts.
        module: the model; of one with a scalar head, a function that returns the scores of texts.
        part: positions of the texts.
    """

    test: _TestTexts
    module: Any
    part: range

    @cached_property
    def texts(self) -> list[TextSample]:
        return [self.test.texts[position] for position in self.part]

    @cached_property
    def questions(self) -> list[Any]:
        return [*map(self.test.reader.question_of, self.texts)]

    @cached_property
    def targets(self) -> list[str]:
        """The target answers as stored with scores."""
        return [text.target.strip() for text in self.texts]

    @cached_property
    def answers(self) -> list[str]:
        """The generated answers, up to the first line break unless targets have line breaks."""
        test = self.test
        if "perplexity" in test.metrics:
            answers, _, _ = self._generated
        else:
            answers = generate(self.module, test.reader, self.questions, test.new_tokens, batch_size=len(self.part))
        if any("\n" in text.target.strip() for text in test.texts):
            return answers
        return [answer.strip().partition("\n")[0] for answer in answers]

    @property
    def likelihoods(self) -> tuple[Tensor, Tensor]:
        """Log-likelihoods [n] in nat of the targets, and their numbers of tokens [n]."""
        if GENERATING.isdisjoint(self.test.metrics):
            answers = [[text.target] for text in self.texts]
            sums, counts = log_likelihoods(self.module, self.test.reader, self.questions, answers)
            return sums[:, 0], counts[:, 0]
        _, sums, counts = self._generated
        return sums, counts

    @cached_property
    def _generated(self) -> tuple[list[str], Tensor, Tensor]:
        targets = [text.target for text in self.texts]
        return generate_with_likelihoods(self.module, self.test.reader, self.questions, self.test.new_tokens, targets)


def _normalize_answer(text: str) -> str:
    return " ".join(text.split()).casefold()


def _exact_match_rows(batch: _TextBatch) -> Iterator[tuple[Any, ...]]:
    for answer, target in zip(batch.answers, batch.targets, strict=True):
        yield float(_normalize_answer(answer) == _normalize_answer(target)), None, answer, target


def _scalar_head_scores(
    study: Study,
    task: str,
    variant: str,
    samples: SampleSet,
    reader: TextProcessor | None,
    texts: Sequence[TextSample],
) -> list[float]:
    """Return the scalar output of a variant's head for each text, such as a reward."""
    model, head = _model_name_in_pool(variant, task), study.head(task, variant)
    assert head is not None
    scores: list[float] = []
    for start in range(0, len(texts), _AT_ONCE):
        features = _text_features(study, model, samples, reader, texts[start : start + _AT_ONCE])
        scores += head.scores(features)[:, 0].tolist()
    return scores


def _preference_rows(batch: _TextBatch) -> Iterator[tuple[Any, ...]]:
    preferred, rejected = (batch.module([TextSample(text[side]) for text in batch.texts]) for side in (0, 1))
    for target, better, worse in zip(batch.targets, preferred, rejected, strict=True):
        yield float(better > worse), None, f"{better:.6g} against {worse:.6g}", target


def _number_answer_rows(batch: _TextBatch) -> Iterator[tuple[Any, ...]]:
    numbers = [batch.test.numbers[position] for position in batch.part]
    if isinstance(batch.module, nn.Module):
        answers, scores = batch.answers, [*map(parse_number, batch.answers)]
        scores = [0.0 if math.isnan(score) else score for score in scores]
    else:
        scores = batch.module([TextSample(text.input) for text in batch.texts])
        answers = [f"{score:.6g}" for score in scores]
    return zip(scores, numbers, answers, batch.targets, strict=True)


def _multiple_choice_rows(batch: _TextBatch) -> Iterator[tuple[Any, ...]]:
    test = batch.test
    assert test.labels is not None
    names, answers = [*test.choices], [*test.choices.values()]
    sums, _ = log_likelihoods(batch.module, test.reader, batch.questions, [answers] * len(batch.part))
    for position, best in zip(batch.part, sums.argmax(dim=1).tolist(), strict=True):
        yield float(names[best] == test.labels[position]), None, names[best], test.labels[position]


def _perplexity_rows(batch: _TextBatch) -> Iterator[tuple[Any, ...]]:
    sums, counts = batch.likelihoods
    for target, total, count in zip(batch.targets, sums.tolist(), counts.tolist(), strict=True):
        yield -total, count, None, target


_MEASURES: dict[str, Callable[[_TextBatch], Iterator[tuple[Any, ...]]]] = {
    "exact_match": _exact_match_rows,
    "choice": _multiple_choice_rows,
    "spearman": _number_answer_rows,
    "preference": _preference_rows,
    "perplexity": _perplexity_rows,
}


@torch.no_grad()
def training_overlap_text(samples: Mapping[str, SampleSet], study: Study) -> str:
    """Describe that experts are more confident on these samples, as if trained on them; empty if they are not.

    Confidences are compared with those on diagnosis samples by Welch's t test, one-sided at 1 %, over all tasks.
    """
    # On two image suites (docs/benchmarks.md), the test warned of 50 to 100 % of draws of 64 training samples, and of
    # 0.6 to 1.6 % of other draws.
    means, groups = list[tuple[float, float]](), list[NDArray[np.float64]]()
    for task, drawn in samples.items():
        model, head = expert_name(task), study.head(task, expert_name(task))
        measured = study.tasks[task].diagnosis
        diagnosed = select_samples(measured, range(min(_MAX_CONFIDENCE_SAMPLES, len(measured))))
        if head is None or min(len(drawn), len(diagnosed)) < 2:
            continue
        confidences = []
        # Without augmented copies and answers: diagnosis samples have none, so confidences would not be comparable.
        for part in (dataclasses.replace(drawn, views=None).without_answers, diagnosed):
            features = final_features(study.pool, model, task, part, study.settings.pool)
            confidences.append(to_float64(head.scores(features)).softmax(dim=1).amax(dim=1).cpu().numpy())
        means.append((float(confidences[0].mean()), float(confidences[1].mean())))
        groups += confidences
    if not means:
        return ""
    # Tasks are strata: the error of the mean over tasks follows from each group's own variance.
    error, freedom = standard_error([part / len(means) for part in groups])
    on_drawn, on_diagnosed = np.mean(means, axis=0)
    # The two-sided level 98 % leaves the 1 % above that a one-sided test needs.
    if not on_drawn - on_diagnosed > t_quantile(freedom, 0.98) * error:
        return ""
    return (
        "experts were probably trained on the calibration samples: mean confidence "
        f"{100 * on_drawn:.1f} %, {100 * on_diagnosed:.1f} % on diagnosis samples"
    )
