"""Criteria without labels: how far is the model that each one chooses behind the best candidate by test score?

`python -m benchmarks.criteria --folder KEPT` measures the sub-suites that the folder lacks, a file each, and prints a
table of all that it has. A sub-suite is drawn by its number, see `SubSuite`. Candidates are made from one half of the
calibration samples and judged on the other half, as `calibrate --auto` does; both halves can take turns. Test scores
are of candidates made from all samples, on other test samples. `regrets` reads no model, so that criteria can be
compared again in seconds.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import repairs
from benchmarks.figures import record
from driftlens.calibration.automatic import HeldOutScores, choose_model
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.checkpoints.tensor_sources import InMemorySource, InterpolatedSource, StateSource
from driftlens.config.data import Views
from driftlens.config.spec import load_spec
from driftlens.data.altered import append_views
from driftlens.data.samples import SampleSet, select_samples
from driftlens.engine.sites import select_sites, sites_to_update
from driftlens.experiment.merging import merge_study
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import open_study
from driftlens.merging.method import merge_by_name
from driftlens.pipelines.evaluation import final_features, score_variants
from driftlens.pipelines.model_selection import CANDIDATE_MODEL, CandidateFitter
from driftlens.utils.distributed import ProgressReporter
from driftlens.utils.intervals import mean_over_draws
from driftlens.utils.variants import expert_name

Array = NDArray[np.float64]
FACTORS = (0.2, 0.4, 0.6, 0.8, 1.0)
SUITES = ("real", "llama", "t5")
# The expert's most probable classes that are stored; all others together are one class.
KEPT_CLASSES = 127
MOST_TESTS = 250
PARTS = (0, 1)


@dataclass(frozen=True)
class SubSuite:
    """A suite drawn by its number.

    Attributes:
        suite: the suite that it is a part of.
        tasks: number of tasks.
        strength: scaling of Task Arithmetic.
        samples: calibration samples per task.
        is_unseen: True if the experts were not trained on them.
        reach: position of experts between base, 0, and trained experts, 1; below 1, the base is strong.
    """

    number: int
    suite: str
    tasks: int
    strength: float
    samples: int
    is_unseen: bool
    reach: float

    @classmethod
    def draw(cls, number: int) -> SubSuite:
        rng = np.random.default_rng(number)
        # Experts near the base, merged so strongly that the merge is worse than the base; and experts beyond the
        # trained ones, which are too confident and hardly better than the base.
        is_near, is_beyond = number < 20 and number % 5 in (3, 4), number >= 20
        strengths = (1.0, 1.5, 2.0) if is_near else (0.4, 0.5, 0.6) if is_beyond else (0.2, 0.3, 0.4, 0.5, 0.6)
        reaches = (0.3, 0.4, 0.5) if is_near else (1.5, 1.6, 1.75) if is_beyond else (1.0,)
        return cls(
            number,
            SUITES[number % 3],
            int(rng.choice((3, 4))),
            float(rng.choice(strengths)),
            (16, 64, 64, 8)[number % 4],
            number % 2 == 0,
            float(rng.choice(reaches)),
        )


def _repairs(drawn: SubSuite) -> dict[str, tuple[Calibrator, int]]:
    """Calibrators with their number of views, by name."""
    residual, featcal = calibrators["residual"]().changed(mu=0.9), calibrators["featcal"]
    return {
        "featcal": (featcal(**featcal.presets[repairs.PRESETS[drawn.suite]]), 0),
        "residual": (residual, 0),
        "residual, views": (residual, 7 if drawn.samples < 32 else 3),
    }


@torch.no_grad()
def measure(drawn: SubSuite, file: pathlib.Path) -> None:
    """Make, judge and test all candidates of a sub-suite; write log-probabilities and test scores."""
    arrays: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        study = _opened(drawn, pathlib.Path(place))
        every, base = study.calibration_sets, study.pool.source("base")
        sites = select_sites(study.pool.chain)
        fitter = CandidateFitter(
            study,
            lambda update: sites_to_update(study.pool.chain, sites, update),
            ProgressReporter(),
            "choose",
            pathlib.Path(place) / "features",
        )
        judged = _judged_samples(every)
        top = dict[tuple[str, str], Tensor]()
        for (label, task), samples in judged.items():
            found = _log_probabilities(study, expert_name(task), task, samples)
            top[label, task] = found.topk(min(KEPT_CLASSES, found.shape[1]), dim=1).indices
            arrays[f"{label}|expert|{task}"] = _packed(found, top[label, task])

        def judge(name: str, part: int) -> None:
            for (label, task), samples in judged.items():
                positions = range(part, len(samples), 2)
                found = _log_probabilities(study, CANDIDATE_MODEL, task, select_samples(samples, positions))
                kept = top[label, task][[*positions]]
                arrays[f"{label}|{name}|{task}|{part}"] = _packed(found, kept)

        def test(name: str, variant: str = CANDIDATE_MODEL) -> None:
            for task in study.tasks:
                rows = score_variants(study, task, [variant], ProgressReporter()).tables["scores"]
                arrays[f"test|{name}|{task}"] = np.array([row["value"] for row in rows], dtype=np.float32)

        def make(name: str, shown: Mapping[str, SampleSet]) -> None:
            if name in ("base", "merged"):
                study.pool.add(CANDIDATE_MODEL, study.pool.source(name))
            elif name == "average":
                study.pool.add(CANDIDATE_MODEL, merge_study(study.without_labels(shown), merge_by_name(name)))
            else:
                calibrator, copies = _repairs(drawn)[name]
                views = Views(copies=copies) if copies else None
                fitter.fit(calibrator, {task: replace(of, views=views) for task, of in shown.items()})

        test("expert", "expert")
        for name in ("base", "merged", "average", *_repairs(drawn)):
            for part in (*PARTS, None):
                others = range(2) if part is None else [1 - part]
                shown = {
                    task: select_samples(of, sorted(at for other in others for at in range(other, len(of), 2)))
                    for task, of in every.items()
                }
                begun = time.process_time()
                make(name, shown)
                arrays[f"cost|{name}|{part}"] = time.process_time() - begun
                model = _in_memory(study.pool.source(CANDIDATE_MODEL))
                for factor in FACTORS if name in ("merged", "residual, views") else FACTORS[-1:]:
                    study.pool.add(CANDIDATE_MODEL, _in_memory(InterpolatedSource(base, model, factor)))
                    test(f"{name}@{factor:g}") if part is None else judge(f"{name}@{factor:g}", part)
    np.savez_compressed(file, **arrays)


def _judged_samples(every: Mapping[str, SampleSet]) -> dict[tuple[str, str], SampleSet]:
    """Samples to judge on: as a model is asked them, an augmented copy of each, and texts with their answers."""
    judged = {}
    for task, samples in every.items():
        asked = samples.without_answers
        copies = append_views(replace(asked, views=Views(copies=1, seed=77)))
        judged["held", task] = asked
        judged["view", task] = select_samples(copies, range(len(asked), len(copies)))
        if samples.texts is not None:
            judged["shown", task] = samples
    return judged


def _in_memory(source: StateSource) -> InMemorySource:
    return InMemorySource(source.name, {key: source.read(key) for key in source.headers})


def _opened(drawn: SubSuite, place: pathlib.Path) -> Study:
    """Open the study with the calibration samples, test samples, experts and merged model of a sub-suite."""
    rng = np.random.default_rng(1000 + drawn.number)
    spec = repairs.spec_of(drawn.suite, drawn.number, "cpu", place, drawn.samples)
    tasks = sorted(rng.permutation(sorted(spec["experts"]))[: drawn.tasks].tolist())
    for section in {"experts", "data", "heads"} & spec.keys():
        spec[section] = {key: of for key, of in spec[section].items() if key in {*tasks, "defaults"}}
    if drawn.suite != "real" and drawn.is_unseen:
        for task in tasks:
            file = repairs.SHARED / "real_text" / "data" / task / "test.jsonl"
            lines = file.read_text().splitlines(keepends=True)[repairs.TEXTS :]
            (place / f"unseen-{task}.jsonl").write_text("".join(lines))
            spec["data"][task]["calibration"] = str(place / f"unseen-{task}.jsonl")
    study, _ = open_study(load_spec(spec))
    data = {}
    for task, of in study.tasks.items():
        test, calibration = of.test, of.calibration
        assert test is not None and calibration is not None
        order = rng.permutation(len(test)).tolist()
        if drawn.suite == "real":
            if drawn.is_unseen:
                calibration = select_samples(test, order[: drawn.samples])
            test = select_samples(test, order[drawn.samples : drawn.samples + MOST_TESTS])
        data[task] = replace(of, test=test, calibration=replace(calibration, labels=None))
        expert = InterpolatedSource(study.pool.source("base"), study.pool.source(expert_name(task)), drawn.reach)
        study.pool.add(expert_name(task), _in_memory(expert))
    study = replace(study, tasks=data)
    study.pool.add("merged", merge_study(study, merge_by_name("task_arithmetic", {"scaling": drawn.strength})))
    return study


def _log_probabilities(study: Study, model: str, task: str, samples: SampleSet) -> Tensor:
    head = study.head(task, model)
    assert head is not None
    return head.scores(final_features(study.pool, model, task, samples, study.settings.pool)).double().log_softmax(1)


def _packed(found: Tensor, top: Tensor) -> NDArray[np.float32]:
    """Log-probabilities of these classes [n, k], and of all others together as a last column if there are others."""
    kept = found.gather(1, top)
    if found.shape[1] > top.shape[1]:
        kept = torch.cat([kept, found.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)], dim=1)
    return kept.numpy().astype(np.float32)


def _kl(expert: Array, model: Array) -> Array:
    return (np.exp(expert) * (expert - model)).sum(axis=1)


def _hellinger(expert: Array, model: Array) -> Array:
    return np.sqrt(((np.exp(expert / 2) - np.exp(model / 2)) ** 2).sum(axis=1) / 2)


def _tempered(found: Array, temperature: float) -> Array:
    scaled = found / temperature
    return scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))


def _floored(found: Array, part: float) -> Array:
    return np.log((1 - part) * np.exp(found) + part / found.shape[1])


TEMPERATURES = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.8, 4.0)


def _kl_fitted(expert: Array, model: Array) -> Array:
    """KL divergence of the model at the temperature that makes it smallest."""
    found = [_kl(expert, _tempered(model, at)) for at in TEMPERATURES]
    return min(found, key=np.mean)


def _kl_as_confident(expert: Array, model: Array) -> Array:
    """KL divergence of the model at the temperature that gives it the expert's mean confidence."""
    wanted = np.exp(expert).max(axis=1).mean()
    found = [_tempered(model, at) for at in TEMPERATURES]
    return _kl(expert, min(found, key=lambda of: abs(np.exp(of).max(axis=1).mean() - wanted)))


# Log-probabilities of expert and model [n, classes] -> the criterion [n], lower is better.
CRITERIA: Mapping[str, Callable[[Array, Array], Array]] = {
    "Hellinger distance": _hellinger,
    "KL": _kl,
    "KL, floor 0.01 of a uniform distribution": lambda expert, model: _kl(expert, _floored(model, 0.01)),
    "KL, floor 0.1 of a uniform distribution": lambda expert, model: _kl(expert, _floored(model, 0.1)),
    "KL, model at its best temperature": _kl_fitted,
    "KL, model as confident as the expert": _kl_as_confident,
    "KL, both at temperature 2": lambda expert, model: _kl(_tempered(expert, 2), _tempered(model, 2)),
    "total variation": lambda expert, model: np.abs(np.exp(expert) - np.exp(model)).sum(axis=1) / 2,
    "1 - model's probability of the expert's decision": lambda expert, model: (
        1 - np.exp(model)[np.arange(len(model)), expert.argmax(axis=1)]
    ),
    "1 - expert's probability of the model's decision": lambda expert, model: (
        1 - np.exp(expert)[np.arange(len(model)), model.argmax(axis=1)]
    ),
    "disagreement, ties by Hellinger distance": lambda expert, model: (
        (expert.argmax(axis=1) != model.argmax(axis=1)) + 1e-6 * _hellinger(expert, model)
    ),
}
# Averages of the ranks by several criteria; ties by the first one.
RANKED = (
    ("Hellinger distance", "KL"),
    ("KL", "disagreement, ties by Hellinger distance"),
    ("Hellinger distance", "KL", "disagreement, ties by Hellinger distance"),
)
# The criterion of `--auto`.
USED = "1 - model's probability of the expert's decision"
PLACES = {
    "held": "samples",
    "view": "copies",
    "both": "samples and copies",
    "shown": "samples, texts after their answers",
}
# From this number on, experts are beyond the trained ones.
BEYOND = 20


@dataclass(frozen=True)
class Measured:
    """The results of one sub-suite: log-probabilities by model and task, and test scores by model."""

    drawn: SubSuite
    arrays: Mapping[str, NDArray[Any]]

    @property
    def tasks(self) -> list[str]:
        return sorted({key.split("|")[2] for key in self.arrays if key.startswith("test|expert|")})

    @property
    def models(self) -> list[str]:
        """Names of the models, from the simplest to the most expensive."""
        return list(dict.fromkeys(key.split("|")[1] for key in self.arrays if key.startswith("held|") and "@" in key))

    def test_score(self, model: str) -> float:
        """Return the mean over tasks, in %."""
        return 100 * float(np.mean([self.arrays[f"test|{model}|{task}"].mean() for task in self.tasks]))

    def is_clearly_below(self, model: str, other: str) -> bool:
        """Return True if the 95 % interval of the difference, paired by test sample, is below 0."""
        scores = (
            HeldOutScores({task: -self.arrays[f"test|{name}|{task}"].astype(float) for task in self.tasks})
            for name in (other, model)
        )
        first, second = scores
        return first.compare_to(second).is_clear

    def regret(self, model: str) -> float:
        """Return by how many points the model is behind the best one by test score."""
        return max(map(self.test_score, self.models)) - self.test_score(model)

    def scores(self, criterion: str, place: str, parts: Sequence[int]) -> dict[str, HeldOutScores]:
        """Return the criterion by model, task and sample."""
        labels = ("held", "view") if place == "both" else (place,)
        if "shown" in labels and self.drawn.suite == "real":
            labels = ("held",)

        def values(label: str, model: str, task: str, part: int) -> Array:
            expert = self.arrays[f"{label}|expert|{task}"].astype(float)[part::2]
            return CRITERIA[criterion](expert, self.arrays[f"{label}|{model}|{task}|{part}"].astype(float))

        def all_values(model: str, task: str) -> Array:
            halves = [np.mean([values(label, model, task, part) for label in labels], axis=0) for part in parts]
            return np.concatenate(halves)

        return {model: HeldOutScores({task: all_values(model, task) for task in self.tasks}) for model in self.models}


def read(folder: pathlib.Path) -> list[Measured]:
    """Read all measured sub-suites of a folder."""
    files = sorted(folder.glob("*.npz"), key=lambda file: int(file.stem))
    return [Measured(SubSuite.draw(int(file.stem)), dict(np.load(file))) for file in files]


def lowest_mean(scores: Mapping[str, HeldOutScores]) -> str:
    """Return the model with the lowest mean."""
    return min(scores, key=lambda model: scores[model].mean)


def best_factors(scores: Mapping[str, HeldOutScores]) -> dict[str, HeldOutScores]:
    """Return merged model and base, then each candidate at its best interpolation factor, as `--auto` compares them."""
    kept = {"merged@1": scores["merged@1"], "base@1": scores["base@1"]}
    for name in ("merged", "average", "featcal", "residual, views"):
        # The largest factor first: `min` takes the first of equals.
        factors = [model for model in reversed([*scores]) if model.rpartition("@")[0] == name]
        best = min(factors, key=lambda model: scores[model].mean)
        kept.setdefault(best, scores[best])
    return kept


def within_one_error(scores: Mapping[str, HeldOutScores]) -> str:
    """Return the model that `--auto` chooses."""
    candidates = best_factors(scores)
    name = choose_model({"merged": candidates.pop("merged@1")} | candidates).name
    return "merged@1" if name == "merged" else name


def clearly_better(scores: Mapping[str, HeldOutScores]) -> str:
    """Return the first of merged model, base and best candidate that no other clearly beats (Bonferroni)."""
    candidates = best_factors(scores)
    order = ["merged@1", "base@1", lowest_mean(candidates)]
    among = len(candidates) - 1
    return next(
        model
        for model in order
        if not any(of.compare_to(candidates[model], among=among).is_clear for of in candidates.values())
    )


RULES: Mapping[str, Callable[[Mapping[str, HeldOutScores]], str]] = {
    "most expensive within one standard error": within_one_error,
    "lowest mean": lowest_mean,
    "merged model or base unless another is clearly better": clearly_better,
}


def regrets(every: Sequence[Measured], place: str = "both", parts: Sequence[int] = PARTS[:1]) -> dict[str, Array]:
    """Return per criterion the regrets of the models with the lowest means, [sub-suites]."""
    found = dict[str, list[float]]()
    for one in every:
        means = {name: np.array([of.mean for of in one.scores(name, place, parts).values()]) for name in CRITERIA}
        for names in RANKED:
            ranks = sum(means[name].argsort().argsort() for name in names)
            means["rank by " + " and ".join(names)] = ranks + 1e-6 * means[names[0]]
        for name, values in means.items():
            found.setdefault(name, []).append(one.regret(one.models[int(values.argmin())]))
    return {name: np.array(values) for name, values in found.items()}


def left_out_regrets(every: Sequence[Measured], found: Mapping[str, Array]) -> Array:
    """Return the regret on each suite of the criterion that is best on the two other suites, [sub-suites]."""
    suites = np.array([one.drawn.suite for one in every])
    names, values, result = [*found], np.array([*found.values()]), np.zeros(len(every))
    for suite in {*suites}:
        best = values[:, suites != suite].mean(axis=1).argmin()
        print(f"best without {suite}: {names[best]}")
        result[suites == suite] = values[best, suites == suite]
    return result


def run(device: str, folder: str = "criteria", numbers: Sequence[int] = range(28)) -> None:
    """Measure missing sub-suites on the CPU, then print and record regrets of criteria, places and rules."""
    kept = pathlib.Path(folder)
    kept.mkdir(exist_ok=True)
    for number in numbers:
        if not (file := kept / f"{number}.npz").exists():
            measure(SubSuite.draw(number), file)
    measured = read(kept)
    every = [one for one in measured if one.drawn.number < BEYOND]
    found = regrets(every)
    for name, values in sorted(found.items(), key=lambda entry: entry[1].mean()):
        record("criteria", f"criterion: {name}", _interval(values), device=device)
    record("criteria", "criterion: the best one of the two other suites", _interval(left_out_regrets(every, found)))
    for place, title in PLACES.items():
        for parts in (PARTS[:1], PARTS):
            values = regrets(every, place, parts)[USED]
            halves = "one half" if parts != PARTS else "both halves"
            record("criteria", f"expected disagreement on {title}, {halves}", _interval(values), device=device)
    record_views(every)
    for experts, group in (("", every), ("experts beyond the trained ones: ", measured[len(every) :])):
        for name, rule in RULES.items():
            models = [rule(one.scores(USED, "both", PARTS[:1])) for one in group]
            values = np.array([one.regret(model) for one, model in zip(group, models, strict=True)])
            below = sum(
                any(one.is_clearly_below(model, other) for other in ("base@1", "merged@1", "average@1"))
                for one, model in zip(group, models, strict=True)
            )
            result = f"{_interval(values)}; clearly below base, merge or average in {below}"
            record("criteria", f"{experts}rule: {name}", result, device=device)


def record_views(every: Sequence[Measured]) -> None:
    """Record what views add to residual calibration, for few and for more samples per task."""
    for title, counts in (("8 or 16 samples per task", (8, 16)), ("64 samples per task", (64,))):
        group = [one for one in every if one.drawn.samples in counts]
        gains = [one.test_score("residual, views@1") - one.test_score("residual@1") for one in group]
        record(
            "criteria", f"test score of residual calibration, views minus none, {title}", _interval(np.array(gains))
        )


def _interval(values: Array) -> str:
    mean = mean_over_draws(values)
    return f"{mean.value:.2f} points ({mean.low:.2f} to {mean.high:.2f}) on {len(values)} sub-suites"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="criteria", help="where what was measured is kept")
    parser.add_argument("--numbers", nargs="*", type=int, default=range(28))
    run("cpu", **vars(parser.parse_args()))
