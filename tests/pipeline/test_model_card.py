"""The model card: every number from the tables, every name escaped, no path of this machine."""

from __future__ import annotations

import pathlib
import re

import pytest
import yaml
from scipy import stats

import driftlens as dl
from driftlens.pipeline.calibrate.card import escaped, model_card
from driftlens.pipeline.calibrate.job import calibrate
from driftlens.records.before_after import accuracy_changes
from driftlens.records.run import DriftRun
from tests.pipeline.calibrating import CONTROL, NAME, VARIANT, copied, request
from tests.pipeline.world import TASKS, World, build

HOSTILE = "<img src=x>|[a](b) *x* _y_ `z` https://evil.example $m$ @you"


@pytest.fixture(scope="module")
def run(light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return calibrate(copied(light, tmp_path_factory.mktemp("runs") / "run"), request())


@pytest.fixture(scope="module")
def card(run: DriftRun) -> str:
    return (run.path / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")


def test_the_card_in_the_run_is_the_one_its_tables_give(run: DriftRun, card: str) -> None:
    assert card == model_card(run, NAME)


def test_the_front_matter_is_what_the_hub_reads(card: str) -> None:
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "open_clip" and "model-merging" in front["tags"]
    assert "base_model" not in front, "local files are no models of the Hub"


def test_drift_accuracy_and_intervals_are_the_tables(run: DriftRun, card: str) -> None:
    for task in TASKS:
        for variant, title in (("merged", "merged"), (CONTROL, "featcal, anchor only"), (VARIANT, "featcal")):
            row = run.accuracy(task, variant).iloc[0]
            final = run.layers(task, variant, "final").iloc[0]
            freedom = int(final["n"]) - 1
            error, cosine_error = (
                stats.t.ppf(0.975, freedom) * final[column] / freedom**0.5
                for column in ("drift_l2_std", "cos_std")
            )
            scale = final["drift_rel"] / final["drift_l2_mean"]
            cells = [
                task,
                title,
                f"{final['drift_l2_mean']:#.4g} \u00b1 {error:#.2g}",
                f"{100 * final['drift_rel']:.1f} % \u00b1 {100 * error * scale:.1f} %",
                f"{final['cos_mean']:#.4g} \u00b1 {cosine_error:#.2g}",
            ]
            assert f"| {' | '.join(cells)} |" in card
            cells = [
                task,
                title,
                f"{100 * row['value']:.1f} %",
                f"{100 * row['ci_low']:.1f} to {100 * row['ci_high']:.1f} %",
                f"{row['n']}",
            ]
            assert f"| {' | '.join(cells)} |" in card


def test_means_over_tasks_have_intervals_and_the_anchor_alone_is_a_row_of_its_own(card: str) -> None:
    (said,) = [line for line in card.splitlines() if line.startswith("- Mean accuracy over 2 tasks: ")]
    assert len(re.findall(r"\d % \([\d.]+ to [\d.]+ %\)", said)) == 3 and "featcal, anchor only " in said
    assert "rescaling" not in card


def test_changes_of_accuracy_have_an_interval_on_test_samples_and_say_which_are_paired(
    run: DriftRun, card: str
) -> None:
    for entry in accuracy_changes(run, NAME):
        assert entry.n == 9 and entry.split == "diagnosis" and entry.paired is not None
        cells = [
            entry.task,
            f"{100 * entry.change:+.1f}",
            f"{100 * entry.low:+.1f} to {100 * entry.high:+.1f}",
            "9",
        ]
        assert f"| {' | '.join(cells)} |" in card
        counts = [f"{entry.paired.n}", f"{entry.paired.gained}", f"{entry.paired.lost}"]
        assert f"| {entry.task} | diagnosis | {' | '.join(counts)} |" in card
    assert (
        "| McNemar p |" in card and "wider than it need be, as both models answered the same samples" in card
    )


def test_models_samples_and_recipe_are_named_by_digest(run: DriftRun, card: str) -> None:
    for model in ("base", "merged", *(f"expert:{task}" for task in TASKS), VARIANT):
        assert f"`{run.manifest.models[model].digest}`" in card
    for task in TASKS:
        assert f"| {task} | 4 | `{run.manifest.sample_id_digests['calibration'][task]}` |" in card
    assert "task\\_arithmetic (scaling 0.3)" in card and "| rho | 2.0 |" in card and "layers 2 to 4" in card


def test_preset_sites_and_seed_are_named(run: DriftRun, card: str) -> None:
    count = len(run.calibration(NAME))
    assert (
        "| Preset | paper-clip |" in card
        and f"samples were drawn with seed {run.manifest.seeds['samples']}" in card
    )
    assert f"| Sites | every linear and norm module of these layers ({count} modules) |" in card


def test_no_path_of_this_machine_is_in_it(world: World, run: DriftRun, card: str) -> None:
    assert str(world.folder) not in card and str(run.path.parent) not in card
    assert "flowers.safetensors" in card


def test_names_that_a_user_chose_are_shown_and_not_read(tmp_path: pathlib.Path) -> None:
    world = build(tmp_path / "models", tasks=("plain",))
    spec = world.spec(name=HOSTILE, metrics={"jacobian": False})
    dl.analyze(spec, out=tmp_path / "run", progress="none")
    text = model_card(calibrate(tmp_path / "run", request()), NAME)
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title == f"# {escaped(HOSTILE)}: featcal"
    assert "<" not in title and not re.search(r"(?<!\\)[|\[\]*_`$@]", title) and "https://" not in title


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb", "a\ufffdb"),
        ("# not a title", "\\# not a title"),
        ("R&D <1>", "R&amp;D &lt;1&gt;"),
        ("x-1.0 (y)", "x-1.0 (y)"),
    ],
    ids=["line break", "title", "html", "harmless"],
)
def test_escaping_keeps_one_readable_line(text: str, expected: str) -> None:
    assert escaped(text) == expected
