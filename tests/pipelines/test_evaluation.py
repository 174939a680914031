"""Accuracy of every variant: right, read once, told in progress, and the same whatever fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlens.data.samples import SampleSet
from driftlens.experiment.study import AnalysisSettings, Study, TaskSamples
from driftlens.models.heads import Head
from driftlens.pipelines import evaluation
from driftlens.pipelines.evaluation import score_variants
from driftlens.utils.distributed import ProgressReporter
from driftlens.utils.intervals import wilson_interval
from driftlens.utils.progress import ProgressEvent
from tests.zoo.cases import CASES, perturbed, pool_of

VARIANTS = ["expert", "base", "merged"]
COUNTS = {"a": 8, "b": 5}
BATCH = 3
CLASSES = tuple("pqrs")


@dataclass
class Prepared:
    """A study whose models disagree, and what its samples were asked for.

    The labels are what each task's expert says, but for its first sample.
    """

    study: Study
    modules: dict[str, nn.Module]
    inputs: dict[str, Any]
    reads: list[list[int]] = field(default_factory=list)


def prepared(case: str = "sequential") -> Prepared:
    base = CASES[case].build().double().eval()
    names = ("merged", "expert:a", "expert:b")
    modules = {"base": base} | {name: perturbed(base, seed, scale=1.0) for seed, name in enumerate(names, 1)}
    inputs = {
        task: CASES[case].inputs(torch.Generator().manual_seed(seed), COUNTS[task]) for seed, task in enumerate(COUNTS)
    }
    made = Prepared(None, modules, inputs)  # type: ignore[arg-type]
    made.study = Study(
        name="x",
        pool=pool_of(CASES[case], modules),
        variants=("base", "merged"),
        tasks={task: task_samples(made, task) for task in COUNTS},
        settings=AnalysisSettings(pool="cls", stored_layers=frozenset()),
        seed=7,
    )
    return made


def task_samples(made: Prepared, task: str) -> TaskSamples:
    def load(positions: Sequence[int]) -> Any:
        made.reads.append(list(positions))
        return taken(made.inputs[task], positions)

    width = outputs(made, "base", task).shape[1]
    rows = torch.randn(len(CLASSES), width, generator=torch.Generator().manual_seed(5))
    head = Head(CLASSES, F.normalize(rows, dim=1), 10.0)
    named = predictions(made, "expert", task, head)
    labels = (next(name for name in CLASSES if name != named[0]), *named[1:])
    ids = tuple(f"test/{at}" for at in range(len(labels)))
    samples = SampleSet(task, "test", ids, labels, load, batch_size=BATCH)
    return TaskSamples(diagnosis=samples, test=samples, head=head)


def taken(inputs: Any, positions: Sequence[int]) -> Any:
    rows = list(positions)
    return {key: leaf[rows] for key, leaf in inputs.items()} if isinstance(inputs, dict) else inputs[rows]


def outputs(made: Prepared, variant: str, task: str) -> torch.Tensor:
    """Final features by the library's own module."""
    module, inputs = made.modules[f"expert:{task}" if variant == "expert" else variant], made.inputs[task]
    with torch.no_grad():
        return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def predictions(made: Prepared, variant: str, task: str, head: Head) -> list[str]:
    cosines = F.normalize(outputs(made, variant, task), dim=1) @ head.embeddings.double().T
    return [head.classes[at] for at in cosines.argmax(dim=1)]


def own_accuracy(made: Prepared, variant: str, task: str) -> float:
    at = made.study.tasks[task]
    assert at.head is not None and at.test is not None and at.test.labels is not None
    named = predictions(made, variant, task, at.head)
    return sum(name == label for name, label in zip(named, at.test.labels, strict=True)) / len(named)


@pytest.mark.parametrize("case", ["sequential", "masked_decoder"], ids=["tensor inputs", "dict inputs"])
@pytest.mark.parametrize("task", COUNTS)
def test_the_accuracy_is_that_of_the_librarys_own_modules(case: str, task: str) -> None:
    made = prepared(case)
    answers = score_variants(made.study, task, VARIANTS, ProgressReporter())
    rows = answers.tables["accuracy"]
    expected = [own_accuracy(made, variant, task) for variant in VARIANTS]
    assert [row["value"] for row in rows] == expected
    assert expected[0] == 1 - 1 / COUNTS[task] and expected[0] not in expected[1:], "who agrees is not told apart"
    for row, variant in zip(rows, VARIANTS, strict=True):
        right = round(float(str(row["value"])) * COUNTS[task])
        assert (row["task"], row["variant"], row["n"], row["seed"]) == (task, variant, COUNTS[task], 7)
        assert (row["ci_low"], row["ci_high"]) == wilson_interval(right, COUNTS[task])
    at = made.study.tasks[task]
    assert at.head is not None and at.test is not None and at.test.labels is not None
    stored = [(row["variant"], row["sample_id"], row["value"]) for row in answers.tables["scores"]]
    assert stored == [
        (variant, sample, float(named == label))
        for variant in VARIANTS
        for sample, named, label in zip(
            at.test.ids, predictions(made, variant, task, at.head), at.test.labels, strict=True
        )
    ]


@pytest.mark.parametrize("variants", [["merged"], VARIANTS], ids=["one variant", "three variants"])
@pytest.mark.parametrize("budget", [1, 1 << 30], ids=["one batch at a time", "all at once"])
def test_a_sample_is_read_once_for_all_variants(
    monkeypatch: pytest.MonkeyPatch, variants: list[str], budget: int
) -> None:
    made = prepared()
    monkeypatch.setattr(evaluation, "CHUNK_BYTES", budget)
    score_variants(made.study, "a", variants, ProgressReporter())
    probe, *reads = made.reads
    assert probe == [0], "one sample more, to learn how large they are"
    assert reads == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize("case", ["sequential", "masked_decoder"], ids=["tensor inputs", "dict inputs"])
def test_chunks_change_no_accuracy_and_no_order(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, events = prepared(case), list[ProgressEvent]()
    whole = score_variants(made.study, "a", VARIANTS, ProgressReporter())
    monkeypatch.setattr(evaluation, "CHUNK_BYTES", 1)
    assert score_variants(made.study, "a", VARIANTS, ProgressReporter(events.append)) == whole
    labels = [event.label for event in events]
    assert labels == [*(f"task a: {variant}" for variant in VARIANTS)] * 3 + ["task a"]
