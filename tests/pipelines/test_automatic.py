"""Settings chosen from calibration samples: what is looked at, what is kept, what is written down."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

import driftlens as dl
from driftlens.calibration.automatic import HeldOutScores, choose_model
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.tensor_sources import InterpolatedSource
from driftlens.config.data import Views
from driftlens.config.types import parse_yaml
from driftlens.data.altered import append_views
from driftlens.data.samples import SampleSet, select_samples
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.sites import select_sites
from driftlens.experiment.merging import merge_study
from driftlens.experiment.study import Study, TaskSamples
from driftlens.merging.method import merge_by_name
from driftlens.models.heads import Head
from driftlens.pipelines import evaluation, model_selection
from driftlens.pipelines.analyze import reopen_study
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.calibration_plan import registered_method, replace_parameters, settings_as_json
from driftlens.pipelines.evaluation import final_drift_columns
from driftlens.pipelines.model_selection import (
    CANDIDATE_MODEL,
    CandidateFitter,
    HeldOutScorer,
    choose_calibrator,
    expected_disagreements,
    kl_divergences,
    relative_drift,
)
from driftlens.results.calibration_summary import auto_choice_sentences
from driftlens.results.verdict import verdict
from driftlens.runs.manifest import CANDIDATE, EVENTS, CalibrationInfo, calibration_marker
from driftlens.runs.run import DriftRun
from driftlens.utils.distributed import JobContext, ProgressReporter
from driftlens.utils.errors import Cancelled, DataError, SingularGramError
from driftlens.utils.progress import ProgressEvent
from tests.pipelines.calibrating import COUNT, NAME, copied, request, spoil_merged
from tests.zoo.world import TASKS


@pytest.fixture
def study(roomy: DriftRun) -> Study:
    return reopen_study(roomy.path)[0]


def listed(calibrator: Calibrator, **changes: Any) -> CalibrationInfo:
    """A calibration of layer 2 as the manifest of a run lists it."""
    about = {"method": registered_method(calibrator), "settings": settings_as_json(calibrator), "layers": [2]}
    return CalibrationInfo(**{**about, "control": "", "seconds": 0.0, "samples": {}, **changes})


Existing = Mapping[str, CalibrationInfo]


def chosen(
    study: Study, start: FeatCal | None = None, existing: Existing = MappingProxyType({})
) -> tuple[FeatCal, dict[str, Any]]:
    """What is chosen, while one bar runs from its beginning to its end."""
    said: list[ProgressEvent] = []
    sites, reporter = select_sites(study.pool.chain, layers=[2]), ProgressReporter(said.append)
    found, record = choose_calibrator(study, start or FeatCal(), sites, reporter, existing=existing)
    assert isinstance(found, FeatCal)
    done = [event.done for event in said]
    assert done == sorted(done) and {event.phase for event in said} == {"choose"}
    assert {event.total for event in said} == {done[-1]}
    # Every candidate is told as soon as it is judged.
    judged = [event for event in said if "score" in event.metrics]
    made = {at["title"] for at in record["compared"] if at["name"] not in ("merged", "base") and "score" in at}
    assert {event.label for event in judged} == made
    return found, record


Watch = Callable[[Any, frozenset[str], dict[str, Any]], dict[str, Any]]


def watch_fits(monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Let calibrated models score as `watch` says, given calibrator, ids that it was fitted to, and true scores."""
    fit, of = CandidateFitter.fit, HeldOutScorer.score_model
    calibrator, seen = None, frozenset[str]()

    def spied_fit(self: CandidateFitter, made: Any, samples: Any, cache: Any = None) -> float:
        nonlocal calibrator, seen
        calibrator, seen = made, frozenset(name for drawn in samples.values() for name in drawn.ids)
        return fit(self, made, samples, cache)

    def spied_of(self: HeldOutScorer, model: str, *at: Any) -> dict[str, Any]:
        found = of(self, model, *at)
        return watch(calibrator, seen, found) if model == CANDIDATE_MODEL and found else found

    monkeypatch.setattr(CandidateFitter, "fit", spied_fit)
    monkeypatch.setattr(HeldOutScorer, "score_model", spied_of)


def score_by_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calibrations look as good as their ridge is small: few samples rarely tell settings apart."""
    spoil_merged(monkeypatch)
    watch_fits(monkeypatch, lambda at, _, found: all_at(found, lambda of: 0 * of + at.lam))


def score_by_entrant(monkeypatch: pytest.MonkeyPatch, worse: Callable[[Any], float]) -> None:
    """Let candidates score so much worse than they do."""
    measure = model_selection._HeldOutTrials.score

    def changed(self: Any, entrant: Any) -> Any:
        found = measure(self, entrant)
        return {share: all_at(at, lambda of: of + worse(entrant)) for share, at in found.items()}

    monkeypatch.setattr(model_selection._HeldOutTrials, "score", changed)


def all_at(found: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """What was measured, changed."""
    return {task: {kind: change(of) for kind, of in by_kind.items()} for task, by_kind in found.items()}


class Untouchable(tuple[str, ...]):
    """Labels that nobody may look at."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a label was read")

    def __getitem__(self, _: Any) -> NoReturn:
        raise AssertionError("a label was read")


def guarded(task: str, at: TaskSamples) -> TaskSamples:
    """The same task, whose labels, diagnosis and test samples raise when they are touched."""

    def refuse(positions: Sequence[int]) -> NoReturn:
        raise AssertionError("a sample was read that is not for calibration")

    forbidden = SampleSet(task, "test", ("x",) * 20, Untouchable(("y",) * 20), refuse)
    assert at.calibration is not None
    labelled = dataclasses.replace(at.calibration, labels=Untouchable(at.calibration.labels or ()))
    return dataclasses.replace(at, diagnosis=forbidden, test=forbidden, calibration=labelled)


def blinded(study: Study) -> Study:
    return dataclasses.replace(study, tasks={task: guarded(task, at) for task, at in study.tasks.items()})


@pytest.mark.slow
def test_neither_a_label_nor_another_sample_is_read(study: Study) -> None:
    """By all candidates of `--auto`; a calibrator or a judge that does look at one is caught."""
    sites, existing = select_sites(study.pool.chain, layers=[2]), {"mine": listed(calibrators["residual"](mu=0.7))}
    options: dict[str, Any] = {"others": True, "existing": existing}
    found, record, again, same = (
        at
        for of in (study, blinded(study))
        for at in choose_calibrator(of, FeatCal(), sites, ProgressReporter(), **options)
    )
    names = {"merged", "base", "start", "residual views=7", "shrunk", "merge average", "calibration mine"}
    assert names == {entry["name"] for entry in record["compared"] if "score" in entry}
    assert record["score"].startswith("expected disagreement")
    assert all(0 <= entry["score"] <= 1 for entry in record["compared"])
    assert again.get_params() == found.get_params() and same["compared"] == record["compared"]


@pytest.mark.parametrize("kind", ["calibration", "diagnosis", "test"])
def test_a_calibrator_that_looks_at_a_label_or_another_sample_is_caught(study: Study, kind: str) -> None:
    blind = blinded(study)

    class Peeking(FeatCal):
        def solve(self, problem: Any) -> Any:
            samples = getattr(blind.tasks[TASKS[0]], kind)
            assert samples.labels[0] if kind == "calibration" else samples.load([0])
            return super().solve(problem)

    with pytest.raises(AssertionError, match=r"a label was read|that is not for calibration"):
        chosen(blind, Peeking())


def held_out_ids(study: Study, monkeypatch: pytest.MonkeyPatch, existing: Existing = MappingProxyType({})) -> None:
    """Require that every candidate is made from one half of a task's samples, and judged on the other half."""
    scored: list[tuple[frozenset[str], frozenset[str]]] = []
    experts: list[str] = []
    read = model_selection.final_features

    def watch(at: Any, ids: frozenset[str], found: dict[str, Any]) -> dict[str, Any]:
        scored[-1] = ids, scored[-1][1]
        return found

    def spied_read(pool: Any, model: str, task: str, samples: SampleSet, pooling: Any) -> torch.Tensor:
        ids = [name.partition(", view")[0] for name in samples.ids]
        if model == CANDIDATE_MODEL:
            scored.append((frozenset(), frozenset(ids)))
        elif model.startswith("expert"):
            experts.extend(ids)
        return read(pool, model, task, samples, pooling)

    watch_fits(monkeypatch, watch)
    monkeypatch.setattr(model_selection, "final_features", spied_read)
    # Ids of different tasks look alike (`train/3`); with one task they can be told apart.
    task = TASKS[0]
    at = study.tasks[task].calibration
    assert at is not None
    _, record = chosen(dataclasses.replace(study, tasks={task: study.tasks[task]}), existing=existing)
    assert set(scored) == {(frozenset(at.ids[1::2]), frozenset(at.ids[::2]))}
    assert record["num_calibrations"] == 2 + len(existing) and record["num_held_out"] == {task: COUNT // 2}
    # Every sample and its augmented copy.
    assert experts == 2 * [*at.ids[::2]], "experts are read once"


def test_half_of_the_samples_is_held_out_and_none_is_scored_that_was_fitted_to(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out_ids(study, monkeypatch, {"mine": listed(FeatCal(lam=0.7))})


def test_a_saved_calibration_that_is_judged_on_samples_that_it_was_fitted_to_is_caught(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = model_selection._HeldOutTrials._make_candidate_model

    def saved(self: Any, candidate: Any) -> None:
        if candidate.name == "calibration mine":  # as it stands in the run: fitted to all samples
            self._fitter.fit(candidate.calibrator, model_selection.without_labels(self.study))
        else:
            make(self, candidate)

    monkeypatch.setattr(model_selection._HeldOutTrials, "_make_candidate_model", saved)
    with pytest.raises(AssertionError):
        held_out_ids(study, monkeypatch, {"mine": listed(FeatCal(lam=0.7))})


def test_a_candidate_that_is_judged_on_the_samples_it_was_made_from_is_caught(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = model_selection.fold_ranges
    monkeypatch.setattr(model_selection, "fold_ranges", lambda *at, **options: 2 * split(*at, **options)[1:])
    with pytest.raises(AssertionError):
        held_out_ids(study, monkeypatch)


def test_a_criterion_that_looks_at_a_label_is_caught(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = blinded(study)

    def peeking(features: torch.Tensor, *_: Any) -> torch.Tensor:
        samples = blind.tasks[TASKS[0]].calibration
        assert samples is not None and samples.labels is not None
        return torch.tensor([float(label == samples.labels[0]) for label in samples.labels])[: len(features)]

    monkeypatch.setattr(model_selection, "expected_disagreements", peeking)
    with pytest.raises(AssertionError, match="a label was read"):
        chosen(blind)


def test_the_choice_is_that_of_brute_force_over_candidates(study: Study) -> None:
    """Every candidate by hand: fitted to a half, judged on the other one at every share of the way from the base."""
    found, record = chosen(study, existing={"mine": listed(FeatCal(lam=0.7))})
    pool, sites = study.pool, select_sites(study.pool.chain, layers=[2])
    samples = {
        task: dataclasses.replace(at.calibration, labels=None)
        for task, at in study.tasks.items()
        if at.calibration is not None
    }

    def half(part: int) -> dict[str, SampleSet]:
        return {task: select_samples(drawn, range(part, COUNT, 2)) for task, drawn in samples.items()}

    def judged(model: str) -> HeldOutScores:
        copied = {
            task: append_views(dataclasses.replace(drawn, views=Views(copies=1, seed=1)))
            for task, drawn in half(0).items()
        }
        found = HeldOutScorer(study, copied).score_model(model)
        return HeldOutScores({task: at["disagreement"] for task, at in found.items()})

    scores = {name: judged(name) for name in ("merged", "base")}
    for name, calibrator in {
        "calibration mine": FeatCal(lam=0.7),
        "start": FeatCal(),
        "featcal rho=3.0 alpha=0.5": FeatCal(rho=3.0, alpha=0.5),
    }.items():
        updates = {
            (layer.layer, parameter): value
            for layer in calibrator.calibrate(CalibrationContext(pool, half(1), sites))
            for parameter, value in layer.updates.items()
        }
        made = replace_parameters(pool.chain, pool.source("merged"), study.dtype_template, updates)
        shares = (1.0,) if name == "calibration mine" else (1.0, 0.8, 0.6, 0.4, 0.2)
        mixed = [InterpolatedSource(pool.source("base"), made, share) for share in shares]
        found_at = []
        for model in mixed:
            pool.add("by hand", model)
            found_at.append(judged("by hand"))
        scores[name] = min(found_at, key=lambda of: of.mean)
    by_name = {entry["name"]: entry for entry in record["compared"]}
    assert {name: of.mean for name, of in scores.items()} == {name: at["score"] for name, at in by_name.items()}
    decision = choose_model(scores, among=4)
    assert record["choice"] == decision.name and found.rho == (3.0 if "rho" in decision.name else FeatCal().rho)
    for name, over in decision.over_merged.items():
        assert (by_name[name]["advantage"], by_name[name]["low"]) == (over.advantage, over.low)


@pytest.mark.slow
def test_the_run_says_how_its_settings_were_chosen(
    roomy: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_merged(monkeypatch)
    folder = copied(roomy, tmp_path / "run")
    run = dl.open_run(folder).calibrate(FeatCal(lam=3.0), name=NAME, auto=True, layers=[2])
    told = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    told = [event for event in told if event["event"] == CANDIDATE]
    assert {event["of"] for event in told} == {NAME} and all(event["score"] >= 0 for event in told)
    config = parse_yaml((folder / f"calibrations/{NAME}/config.yaml").read_text(), "config")
    selection = config["selection"]
    assert config["automatic"] and run.manifest.calibrations[NAME].automatic
    assert {"lam": 3.0, "rho": 2.0, "alpha": 0.3}.items() <= selection["start"].items()
    assert selection["chosen"] == config["settings"] and selection["seconds"] > 0
    names = [entry["name"] for entry in selection["compared"]]
    assert names[:3] == ["merged", "base", "start"] and selection["choice"] in names[2:]
    assert {entry["n"] for entry in selection["compared"]} == {len(TASKS) * COUNT // 2}
    for entry in selection["compared"][1:]:
        assert entry["low"] <= entry["advantage"] <= entry["high"]
    assert selection["num_held_out"] == dict.fromkeys(TASKS, COUNT // 2)
    assert run.manifest.phases[f"calibrate:{NAME}:choose"].state == "done"
    asked = request(parameters=selection["chosen"], layers=[2], interpolate=selection["share"])
    plain = calibrate(copied(roomy, tmp_path / "plain"), asked)
    weights = [load_file(at.path / f"calibrations/{NAME}/weights.safetensors") for at in (run, plain)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


def test_too_few_samples_are_refused(light: DriftRun) -> None:
    with pytest.raises(DataError, match="has 4 calibration samples"):
        chosen(reopen_study(light.path)[0])


def test_what_can_not_be_solved_for_is_out_and_the_others_stay(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = FeatCal.solve

    def fragile(self: FeatCal, problem: Any) -> Any:
        if self.alpha == fails:
            raise SingularGramError("singular", hint="raise lam")
        return solve(self, problem)

    monkeypatch.setattr(FeatCal, "solve", fragile)
    fails = 0.5
    entry = next(entry for entry in chosen(study)[1]["compared"] if "alpha=0.5" in entry["name"])
    assert entry["error"].endswith("singular") and "score" not in entry
    fails = 0.3
    with pytest.raises(SingularGramError):
        chosen(study)


def test_settings_of_existing_calibrations_are_candidates_where_they_are_new(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = FeatCal(lam=1e-4)
    existing = {
        "same": listed(FeatCal()),
        "mine": listed(mine, interpolation={"asked": 0.5, "share": 0.5}),
        "again": listed(mine, interpolation={"share": 0.5}),
        "viewed": listed(FeatCal(), views=dict.fromkeys(TASKS, "mix:1")),
        "mixed": listed(mine, views={TASKS[0]: "mix:1"}),
        "elsewhere": listed(mine.changed(lam=2e-4), layers=[3]),
        "some": listed(mine.changed(lam=2e-4), sites=["norms"]),
        "maps": listed(calibrators["surgery"](), layers=[4]),
        "kept": listed(mine.changed(lam=3e-4), selection={"kept": "base"}),
        "older": listed(FeatCal(), settings={"ridge": 1.0}),
        "plug-in": listed(FeatCal(), method="gone"),
        "other": listed(calibrators["residual"]()),
    }
    score_by_ridge(monkeypatch)
    found, record = chosen(study, existing=existing)
    names = [made["name"] for made in record["compared"]]
    assert names == ["merged", "base", "calibration mine", "calibration viewed", "start", "featcal rho=3.0 alpha=0.5"]
    assert record["choice"] == "calibration mine" and found.get_params() == mine.get_params()
    titles = [made["title"] for made in record["compared"][2:4]]
    assert titles == [
        "featcal with lam 0.0001 (from calibration mine)",
        "featcal (paper-clip) and 1 view of every sample (from calibration viewed)",
    ]
    # At its own interpolation factor, which no curve has chosen.
    assert record["share"] == 0.5 and "curve" not in record
    assert "views" not in record and record["correction"] == "Bonferroni, 5 comparisons"


@pytest.mark.slow
def test_an_existing_calibration_that_is_nearest_is_fitted_to_all_samples_under_the_name_of_its_method(
    roomy: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_merged(monkeypatch)
    score_by_entrant(monkeypatch, lambda entrant: 0.0 if entrant.name == "calibration mine" else 1e3)
    folder, asked = copied(roomy, tmp_path / "run"), request("mine", layers=[2], interpolate=1.0, attribution=False)
    calibrate(folder, asked.with_changes(method="residual", parameters={"mu": 0.7}))
    run = calibrate(folder, asked.with_changes(name="", auto=True))
    info = run.manifest.calibrations["residual"]
    assert info.selection["choice"] == "calibration mine" and info.settings["mu"] == 0.7
    assert "(from calibration mine) was chosen" in auto_choice_sentences(run, "residual")[0]
    weights = [load_file(folder / f"calibrations/{name}/weights.safetensors") for name in ("mine", "residual")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


def test_candidates_keep_every_other_setting(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FeatCal, "candidates", ({"lam": 0.2},))
    score_by_ridge(monkeypatch)
    start = FeatCal(lam=1.0, rho=4.0, update=("linear",), solve_dtype="float64", eps=1e-6)
    found, record = chosen(study, start)
    assert record["choice"] == "featcal lam=0.2" and found.lam == 0.2
    assert found.get_params() == start.get_params() | {"lam": 0.2}


def test_without_a_base_nothing_is_shrunk_and_candidates_that_take_one_are_out(study: Study) -> None:
    bare = dataclasses.replace(study, variants=("merged",))
    _, record = chosen(bare, FeatCal(rho=1.0))
    assert [entry["name"] for entry in record["compared"]] == ["merged", "start"]
    assert record["compared"][1]["share"] == 1.0 and "curve" not in record


def test_the_score_is_the_divergence_of_class_probabilities_from_the_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    expert, found = torch.randn(2, 7, 5, generator=generator)
    rows = F.normalize(torch.randn(3, 5, generator=generator), dim=1)
    head = Head(("a", "b", "c"), rows, 10.0)
    probabilities, others = (
        torch.softmax(10.0 * F.normalize(x.double(), dim=1) @ rows.double().T, dim=1) for x in (expert, found)
    )
    expected = (probabilities * (probabilities / others).log()).sum(dim=1)
    torch.testing.assert_close(kl_divergences(found, head, expert, head), expected, rtol=1e-4, atol=1e-6)
    decided = others[torch.arange(7), probabilities.argmax(dim=1)]
    torch.testing.assert_close(expected_disagreements(found, head, expert, head), 1 - decided, rtol=1e-4, atol=1e-6)
    same = kl_divergences(2 * expert, head, expert, head)
    torch.testing.assert_close(same, torch.zeros(7).double(), rtol=0, atol=1e-6)


def test_without_a_head_the_score_is_the_relative_drift() -> None:
    generator = torch.Generator().manual_seed(0)
    expert, found = torch.randn(2, 7, 5, generator=generator)
    assert float(relative_drift(found, expert).mean()) == pytest.approx(
        final_drift_columns(found, expert)["drift_rel"], rel=1e-6
    )


@pytest.mark.slow
def test_another_merge_is_kept_with_its_share_where_it_is_nearest(
    roomy: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a repair; going on after the choice makes the same merge again, and the card says what it is."""
    watch_fits(monkeypatch, lambda _, __, found: all_at(found, lambda of: of + 1e3))
    spoil_merged(monkeypatch)
    monkeypatch.setattr(model_selection, "_MERGES", ("average",))
    score_by_entrant(monkeypatch, lambda entrant: -2e3 if entrant.merge else 0.0)
    folder, asked = copied(roomy, tmp_path / "run"), request(layers=[2], auto=True)

    def stop(event: Any) -> None:
        if event.phase == "analyze":
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        calibrate(folder, asked, JobContext(on_progress=stop))
    run = calibrate(folder, asked.with_changes(resume=True))
    info = run.manifest.calibrations[NAME]
    assert info.selection["choice"] == "merge average" and info.kept == "merge" and not info.layers
    share, study = info.interpolation["share"], reopen_study(folder)[0]
    made = InterpolatedSource(study.pool.source("base"), merge_study(study, merge_by_name("average")), share)
    for key in made.headers:
        found = study.pool.source(f"calibrated:{NAME}").read(key)
        torch.testing.assert_close(found, made.read(key).to(found.dtype), rtol=1e-5, atol=1e-7)
    assert "another merge of the same experts, by Simple Averaging" in info.unchanged_text
    assert info.unchanged_text in (folder / f"calibrations/{NAME}/README.md").read_text()
    assert any(info.unchanged_text in text for text in verdict(run, NAME).sentences)


@pytest.mark.slow
def test_the_base_is_exported_and_the_merge_advised_against_where_nothing_beats_the_base(
    roomy: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = HeldOutScorer.score_model

    def good_base(self: HeldOutScorer, model: str, *at: Any) -> dict[str, Any]:
        return all_at(measured(self, model, *at), lambda of: 0 * of - (model == "base"))

    monkeypatch.setattr(HeldOutScorer, "score_model", good_base)
    folder = copied(roomy, tmp_path / "run")
    run = dl.open_run(folder).calibrate(FeatCal(), name=NAME, auto=True, layers=[2])
    info = run.manifest.calibrations[NAME]
    assert info.selection["kept"] == "base" and not info.layers and "don't use the merge" in info.notices[-1]
    first, advice, _ = auto_choice_sentences(run, NAME)
    assert "the base was chosen" in first and advice.startswith("Advice: don't use the merge")
    rows = run.layers(layer="final").set_index(["variant", "task"])["drift_l2_mean"]
    assert rows[f"calibrated:{NAME}"].to_dict() == rows["base"].to_dict()
    card = (folder / f"calibrations/{NAME}/README.md").read_text()
    assert "This is the base, unchanged" in card and "in closed form" not in card and "| lam |" not in card
    assert set(yaml.safe_load(card.split("---")[1])["tags"]) == {"driftlens"}
    assert any("is the base, unchanged: don't use the merge" in text for text in verdict(run, NAME).sentences)


@pytest.mark.slow
def test_views_are_chosen_where_they_are_nearest_and_read_again_by_the_repair(
    roomy: DriftRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its end: what is saved is the repair by hand with the views that the record says, bit for bit."""
    spoil_merged(monkeypatch)
    score_by_entrant(monkeypatch, lambda entrant: 0.0 if entrant.views else 1e3)
    folder = copied(roomy, tmp_path / "run")
    run = calibrate(folder, request(method="residual", layers=[2], attribution=False, auto=True))
    info = run.manifest.calibrations[NAME]
    assert info.selection["choice"] == "residual views=7" and info.views == dict.fromkeys(TASKS, "auto:7")
    assert info.samples == dict.fromkeys(TASKS, COUNT) and info.settings["mu"] == 0.9
    # Without a name, it has that of the method that was chosen; the interrupted one of that name is left alone.
    begun = folder / calibration_marker("residual")
    begun.parent.mkdir(parents=True)
    begun.write_text("{}")
    unnamed = calibrate(folder, request("", layers=[2], attribution=False, auto=True, method="residual"))
    assert [*unnamed.manifest.calibrations][-1] == "residual-2" and begun.is_file()
    asked = request("hand", method="residual", parameters=info.selection["chosen"], views=7, layers=[2])
    calibrate(folder, asked.with_changes(interpolate=info.interpolation["share"], attribution=False))
    weights = [load_file(folder / f"calibrations/{name}/weights.safetensors") for name in (NAME, "hand")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])
    assert "auto:7" in (folder / f"calibrations/{NAME}/README.md").read_text()


@pytest.mark.parametrize("is_surer", [True, False])
def test_it_warns_where_experts_are_surer_of_these_samples(
    study: Study, monkeypatch: pytest.MonkeyPatch, is_surer: bool
) -> None:
    """Of no label; experts that are as sure of the diagnosis samples were not trained on these."""
    samples = {task: guarded(task, at).calibration for task, at in study.tasks.items()}
    width = {task: study.head(task, f"expert:{task}").embeddings for task in TASKS}  # type: ignore[union-attr]

    def features(_: Any, model: str, task: str, of: SampleSet, *__: Any) -> torch.Tensor:
        rows = width[task][torch.arange(len(of)) % len(width[task])]
        unsure = of.split != "calibration" and is_surer
        return rows + (rows.roll(1, dims=0) if unsure else 0) + 1e-3 * torch.arange(len(of))[:, None]

    monkeypatch.setattr(evaluation, "final_features", features)
    told = evaluation.training_overlap_text(samples, study)
    assert told.startswith("experts were probably trained on") if is_surer else not told
