"""Scores of language models by what they answer: each is whole in memory, once per task, for all its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from driftlens.base.errors import DataError
from driftlens.base.metrics import ACCURACY
from driftlens.base.progress import Reporter
from driftlens.base.variants import expert_of
from driftlens.data.samples import SampleSet
from driftlens.jobs.study.study import Study
from driftlens.models.language.generation import generate, log_likelihoods
from driftlens.models.language.texts import Text, TextReader
from driftlens.models.score_maps import is_of_vocabulary

SPARE_TOKENS = 8
"""What an answer may be longer than the longest target: one that goes on would be cut to an equal one."""


@dataclass
class Said:
    """What was said to some test samples, by variant and metric: of every sample value, reference, answer, target."""

    results: dict[tuple[str, str], list[tuple[Any, ...]]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def answers(study: Study, task: str, variants: Sequence[str], reporter: Reporter, part: range) -> Said:
    """What variants answer to test samples of a task, by the metrics that ask for that; `expert` is the task's own.

    A variant whose weights don't fit `compute.feature_budget` is left out with a notice.
    """
    found, samples = Said(), study.tasks[task].test
    metrics = [name for name in metrics_of(study, task) if name != ACCURACY.name]
    if samples is None or not metrics:
        return found
    asked = _Asked.of(samples, study.tasks[task].choices, metrics)
    total, at_once = len(variants) * len(part), max(1, samples.batch_size)
    for place, variant in enumerate(variants):
        model = expert_of(task) if variant == "expert" else variant
        if reason := _refused(study, model):
            found.notices.append(f"{task}: {', '.join(metrics)} of {variant} not measured: {reason}")
            continue
        said: dict[str, list[tuple[Any, ...]]] = {name: [] for name in metrics}
        with study.pool.loaded(model, task) as module:
            for first in part[::at_once]:
                done = place * len(part) + first - part.start
                reporter.step("answer", done, total, f"task {task}: {variant}")
                for name in metrics:
                    batch = range(first, min(first + at_once, part.stop))
                    said[name] += _MEASURES[name](asked, module, batch)
        found.results |= {(variant, name): results for name, results in said.items()}
    reporter.step("answer", total, total, f"task {task}")
    return found


def metrics_of(study: Study, task: str) -> tuple[str, ...]:
    """What a task is scored by: its data entry's metrics, else accuracy by classes, else the answers themselves."""
    at = study.tasks[task]
    if at.metrics or at.test is None:
        return at.metrics
    if at.test.labels is not None and at.head is not None and not is_of_vocabulary(at.head):
        return (ACCURACY.name,)
    texts = at.test.texts
    if texts is None or texts.reader is None or texts.reader.form == "encoder" or not at.test.text(0).target:
        return ()
    return ("choice",) if at.choices else ("exact_match",)


def _refused(study: Study, model: str) -> str:
    """Why a model can't answer; empty where it can."""
    try:
        study.pool.require_room(model)
    except DataError as error:
        return f"{error.message}. {error.hint}"
    return ""


@dataclass(frozen=True)
class _Asked:
    """Questions and wanted answers of all test samples of a task."""

    texts: list[Text]
    labels: tuple[str, ...] | None
    reader: TextReader
    choices: Mapping[str, str]
    new_tokens: int
    numbers: list[float]

    @classmethod
    def of(cls, samples: SampleSet, choices: Mapping[str, str], metrics: Sequence[str]) -> _Asked:
        """From a test set; `choices` are the texts that answer with each class."""
        assert samples.texts is not None and samples.texts.reader is not None
        texts, reader = samples.all_texts, samples.texts.reader
        bare = [name for name, text in zip(samples.ids, texts, strict=True) if not text.target]
        if bare:
            raise DataError(
                f"task {samples.task}: test sample {bare[0]} has no target, so it can't be scored",
                hint="Give all test samples one, or leave them out.",
            )
        numbers = []
        for name, text in zip(samples.ids, texts, strict=True) if "spearman" in metrics else ():
            number = _number(text.target)
            if number is None:
                raise DataError(
                    f"task {samples.task}: the target of test sample {name}, {text.target!r}, is no number",
                    hint="The metric spearman ranks numbers; name another as data.TASK.metric.",
                )
            numbers.append(number)
        longest = max(len(reader.answer_tokens(text.target)) for text in texts)
        return cls(texts, samples.labels, reader, choices, longest + SPARE_TOKENS, numbers)

    def generated(self, module: Any, part: range) -> list[str]:
        """Greedy answers, up to the first line break where no target has one."""
        questions = [self.texts[at].input for at in part]
        answers = generate(module, self.reader, questions, self.new_tokens, batch_size=len(questions))
        if any("\n" in text.target.strip() for text in self.texts):
            return answers
        return [answer.strip().partition("\n")[0] for answer in answers]


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


Results = Iterator[tuple[Any, Any, str | None, str]]
"""Of every sample: value and reference as the table `scores` has them, what was answered and what was wanted."""


def _exact_match(asked: _Asked, module: Any, part: range) -> Results:
    for at, answer in zip(part, asked.generated(module, part), strict=True):
        target = asked.texts[at].target.strip()
        yield float(_plain(answer) == _plain(target)), None, answer, target


def _spearman(asked: _Asked, module: Any, part: range) -> Results:
    for at, answer in zip(part, asked.generated(module, part), strict=True):
        yield _number(answer) or 0.0, asked.numbers[at], answer, asked.texts[at].target.strip()


def _choice(asked: _Asked, module: Any, part: range) -> Results:
    assert asked.labels is not None
    names, answers = [*asked.choices], [*asked.choices.values()]
    questions = [asked.texts[at].input for at in part]
    sums, _ = log_likelihoods(module, asked.reader, questions, [answers] * len(questions))
    for at, best in zip(part, sums.argmax(dim=1).tolist(), strict=True):
        yield float(names[best] == asked.labels[at]), None, names[best], asked.labels[at]


def _perplexity(asked: _Asked, module: Any, part: range) -> Results:
    texts = [asked.texts[at] for at in part]
    sums, counts = log_likelihoods(
        module, asked.reader, [text.input for text in texts], [[text.target] for text in texts]
    )
    for text, total, count in zip(texts, sums[:, 0].tolist(), counts[:, 0].tolist(), strict=True):
        yield -total, count, None, text.target.strip()


_MEASURES: dict[str, Callable[[_Asked, Any, range], Results]] = {
    "exact_match": _exact_match,
    "choice": _choice,
    "spearman": _spearman,
    "perplexity": _perplexity,
}
