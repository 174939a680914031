"""Scores that need no label, and how well each ranks models: those that a choice compared, by their test scores.

`python -m benchmarks.automatic` calls both: `measured` of every model of a draw, `table` of what its folder has. Every
score is taken as a choice would have it, from a few of the test samples, drawn many times; the models' own scores are
of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from driftlens.pipelines.analyze import reopen_study
from driftlens.pipelines.evaluation import final_features
from driftlens.pipelines.model_selection import hellinger_distances, kl_divergences, relative_drift
from driftlens.utils.variants import expert_name

FEW, TIMES = 16, 200
"""Samples a task that a score is taken from, a quarter of what a choice has, and how often they are drawn."""
TEMPERATURES = (0.5, 0.7, 1.4, 2.0, 2.8)
Columns = Mapping[str, Sequence[float]]
Draw = Mapping[str, Mapping[str, Columns]]
"""By model and task."""
_NAMES = {
    "hellinger": "Hellinger distance",
    "kl": "KL(expert, model)",
    "fitted": "KL, the model at the temperature that fits these samples",
    "kl at 2": "KL, the model at temperature 2",
    "variation": "total variation",
    "jensen": "Jensen-Shannon divergence",
    "surprise": "minus the log-probability of the expert's decision",
    "margin": "minus the margin of the expert's decision, cut at 1",
    "drift": "relative final drift",
    "disagrees": "disagreement with the expert's decision",
}


@torch.no_grad()
def measured(run: Any, variants: Mapping[str, str]) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Of every model by its title, and task, a value per diagnosis sample of each score; lower is better."""
    study, _ = reopen_study(run.path)
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for task, at in study.tasks.items():
        own = {
            model: final_features(study.pool, model, task, at.diagnosis, study.settings.pool)
            for model in (expert_name(task), *variants.values())
        }
        order = np.argsort(at.diagnosis.ids)
        wanted, expert = study.head(task, expert_name(task)), own[expert_name(task)]
        for title, model in variants.items():
            given = study.head(task, model)
            assert wanted is not None and given is not None
            both = own[model], given, expert, wanted
            columns = {"hellinger": hellinger_distances(*both), "kl": kl_divergences(*both)}
            columns |= {"drift": relative_drift(own[model], expert)}
            columns |= _of_scores(given.scores(own[model]).double(), wanted.scores(expert).double())
            found.setdefault(title, {})[task] = {
                name: [float(f"{value:.5g}") for value in values.double().numpy()[order]]
                for name, values in columns.items()
            }
    return found


def _of_scores(given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """From scores of classes of model and expert, [n, classes] each."""
    p, q = wanted.softmax(1), given.softmax(1)
    middle, decided = (p + q) / 2, wanted.argmax(1, keepdim=True)
    others = given.scatter(1, decided, -torch.inf).amax(1)
    halves = [(of * (of.clamp_min(1e-300).log() - middle.clamp_min(1e-300).log())).sum(1) for of in (p, q)]
    return {
        "variation": (p - q).abs().sum(1) / 2,
        "jensen": (halves[0] + halves[1]) / 2,
        "surprise": -given.log_softmax(1).gather(1, decided)[:, 0],
        "margin": -(given.gather(1, decided)[:, 0] - others).clamp_max(1),
        "disagrees": (given.argmax(1) != decided[:, 0]).double(),
        **{
            f"kl at {at:g}": (p * (wanted.log_softmax(1) - F.log_softmax(given / at, dim=1))).sum(1)
            for at in TEMPERATURES
        },
    }


def table(suite: str, draws: Sequence[tuple[Draw, Draw]], seed: int = 0) -> str:
    """Rank correlation of every score with the test score, and what the model that it puts first lacks of the best.

    A draw is what `measured` gives and the test scores, both by model. Means over draws, and draws' standard error.
    """
    by_draw = [_ranked(*draw, np.random.default_rng(seed)) for draw in draws]
    lines = [
        f"{suite}: {len(draws)} draws, {', '.join(f'{len(scores)}' for scores, _ in draws)} models, {FEW} samples a "
        f"task, {TIMES} times",
        "| score | rank correlation | points behind the best |",
        "|---|---|---|",
    ]
    for name, title in _NAMES.items():
        of = np.array([found[name] for found in by_draw])
        error = of.std(axis=0, ddof=1) / len(of) ** 0.5 if len(of) > 1 else [np.nan, np.nan]
        mean = of.mean(axis=0)
        lines.append(f"| {title} | {mean[0]:.3f} ± {error[0]:.3f} | {mean[1]:.2f} ± {error[1]:.2f} |")
    return "\n".join(lines)


def _ranked(found: Draw, scored: Draw, generator: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """By score: mean of Spearman's correlation, higher where it ranks better, and of points behind the best."""
    models, tasks = list(found), list(next(iter(found.values())))
    truth = {task: np.array([scored[model][task]["score"] for model in models]) for task in tasks}
    values = {
        task: {name: np.array([found[model][task][name] for model in models]) for name in found[models[0]][task]}
        for task in tasks
    }
    sums = {name: np.zeros(2) for name in _NAMES}
    for _ in range(TIMES):
        few = {task: generator.permutation(truth[task].shape[1])[:FEW] for task in tasks}
        rest = {task: np.delete(np.arange(truth[task].shape[1]), few[task]) for task in tasks}
        test = np.mean([truth[task][:, rest[task]].mean(axis=1) for task in tasks], axis=0)
        means = {
            name: np.mean([values[task][name][:, few[task]].mean(axis=1) for task in tasks], axis=0)
            for name in values[tasks[0]]
        }
        means["fitted"] = np.min([means["kl"], *(means[f"kl at {at:g}"] for at in TEMPERATURES)], axis=0)
        for name, sum_ in sums.items():
            sum_ += _spearman(-means[name], test), 100 * (test.max() - test[means[name].argmin()])
    return {name: sum_ / TIMES for name, sum_ in sums.items()}


def _spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)
