"""The model card: every number from the tables, every name escaped, no path of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from scipy import stats

import driftlens as dl
from driftlens.experiment.model_card import escape_markdown, merge_card, model_card
from driftlens.merging.method import merge_by_name
from driftlens.pipelines.calibrate import calibrate
from driftlens.results.formatting import typeset_signs
from driftlens.results.verdict import headline, headline_sentence, hide_run_path, verdict
from driftlens.runs.run import DriftRun
from tests.pipelines.calibrating import CONTROL, NAME, VARIANT, copied, request
from tests.zoo.world import TASKS, World, build

HOSTILE = "<img src=x>|[a](b) *x* _y_ `z` https://evil.example $m$ @you"


@pytest.fixture(scope="module")
def run(light: DriftRun, tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    return calibrate(copied(light, tmp_path_factory.mktemp("runs") / "run"), request())


@pytest.fixture(scope="module")
def card(run: DriftRun) -> str:
    return (run.path / f"calibrations/{NAME}/README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_card_in_the_run_is_the_one_its_tables_give(run: DriftRun, card: str) -> None:
    assert card == model_card(run, NAME)


def test_the_front_matter_is_what_the_hub_reads(run: DriftRun, card: str) -> None:
    """By the Hub's own classes, which refuse results that lack what they need."""
    data = ModelCard(card).data
    assert data.library_name == "open_clip" and {"merge", "driftlens", "featcal"} <= set(data.tags)
    assert data.base_model is None and data.license is None, "local files are no models of the Hub"
    assert "```python" not in card, "a run's own file is none that a library loads"
    assert "## How to use it\n\n```python\nimport x\n```\n" in model_card(run, NAME, "import x\n")


def test_parents_on_the_hub_are_named() -> None:
    origins = {
        model: f"/home/me/models--someone--{model[:4]}/snapshots/0/model.safetensors"
        for model in ("base", "expert:cars")
    }
    card = merge_card(
        merge_by_name("task_arithmetic", {"scaling": 0.3}).record,
        {"loader": "hf-clip", "source": "/home/me/model"},
        origins | {"expert:own": "/home/me/own.safetensors"},
        notices=["/home/me/model has none"],
    )
    found = ModelCard(card)
    assert "- model has none" in found.text and "/home/me" not in found.content
    assert found.data.base_model == ["someone/base", "someone/expe"]
    assert found.data.to_dict()["base_model_relation"] == "merge" and found.data.library_name == "transformers"
    assert found.data.license is None and found.data.eval_results is None


def test_drift_accuracy_and_intervals_are_the_tables(run: DriftRun, card: str) -> None:
    for task in TASKS:
        for variant, title in (("merged", "merged"), (CONTROL, "featcal, anchor only"), (VARIANT, "featcal")):
            row = run.accuracy(task, variant).iloc[0]
            final = run.layers(task, variant, "final").iloc[0]
            freedom = int(final["n"]) - 1
            error, cosine_error = (
                stats.t.ppf(0.975, freedom) * final[column] / freedom**0.5 for column in ("drift_l2_std", "cos_std")
            )
            scale = final["drift_rel"] / final["drift_l2_mean"]
            cells = [
                task,
                title,
                f"{final['drift_l2_mean']:#.3g} \u00b1 {error:#.2g}",
                f"{100 * final['drift_rel']:.1f} % \u00b1 {100 * error * scale:.1f} %",
                f"{100 * final['drift_vs_base']:.1f} %",
                f"{final['cos_mean']:#.3g} \u00b1 {cosine_error:#.2g}",
                f"{int(final['n'])}",
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


def test_the_verdict_comes_first_and_the_anchor_alone_is_a_row_of_the_tables(run: DriftRun, card: str) -> None:
    head, first, rest = card.partition("## Verdict\n\n")[2].split("\n\n", 2)
    assert head == f"**{escape_markdown(typeset_signs(headline_sentence(headline(run, NAME))))}**"
    said = [typeset_signs(hide_run_path(run, text)) for text in verdict(run, NAME).sentences]
    assert first.splitlines() == [f"- {escape_markdown(text)}" for text in said]
    assert (
        "anchor" not in first and "featcal, anchor only" in rest and "\n## " not in card.partition("\n## Verdict")[0]
    )


def test_models_samples_and_recipe_are_named_by_digest(run: DriftRun, card: str) -> None:
    for model in ("base", "merged", *(f"expert:{task}" for task in TASKS), VARIANT):
        assert f"`{run.manifest.models[model].digest}`" in card
    for task in TASKS:
        assert f"| {task} | 4 | `{run.manifest.sample_id_digests['calibration'][task]}` |" in card
    assert "task\\_arithmetic (scaling 0.3)" in card and "| rho | 2.0 |" in card and "layers 2 to 4" in card


def test_no_path_of_this_machine_is_in_it(world: World, run: DriftRun, card: str) -> None:
    assert str(world.folder) not in card and str(run.path.parent) not in card
    assert "flowers.safetensors" in card


@pytest.mark.slow
def test_names_that_a_user_chose_are_shown_and_not_read(tmp_path: Path) -> None:
    world = build(tmp_path / "models", tasks=("plain",))
    spec = world.spec(name=HOSTILE, metrics={"jacobian": False})
    dl.analyze(spec, out=tmp_path / "run", progress="none")
    text = model_card(calibrate(tmp_path / "run", request()), NAME)
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title == f"# {escape_markdown(HOSTILE)}: featcal"
    assert "<" not in title and not re.search(r"(?<!\\)[|\[\]*_`$@]", title) and "https://" not in title
