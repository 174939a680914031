"""`driftlens why`: a spec made of models and data alone, the least analysis, and refusals that say what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml

from driftlens.base.errors import SpecError
from driftlens.data.drafted import data_entry
from driftlens.jobs.analyze.why import asked_about, draft, recipe_in
from driftlens.runs.run import open_run
from driftlens.spec import load_spec
from driftlens.suites import probe
from tests.cli.conftest import Cli
from tests.zoo.decoders import CONFIGS, saved
from tests.zoo.world import World, merged_weights, save_transformers


@pytest.fixture
def models(world: World, tmp_path: Path) -> list[str]:
    """A CLIP of transformers, its experts, and their merge."""
    save_transformers(merged_weights(world), tmp_path / "merged")
    experts = [str(world.weights(task, "hf")) for task in world.tasks]
    return [str(world.weights("base", "hf")), *experts, str(tmp_path / "merged")]


def texts(place: Path, **more: Sequence[str]) -> Path:
    """Rows of the built-in texts with other columns beside them."""
    rows = [{"input": text, **{name: values[at % len(values)] for name, values in more.items()}}
            for at, text in enumerate(probe.texts())]  # fmt: skip
    place.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def test_experts_are_named_after_their_folders_and_data_go_with_them(world: World, models: list[str]) -> None:
    asked = asked_about(models, None)
    assert [*asked.experts] == [*world.tasks] and (asked.base, asked.merged) == (models[0], models[-1])
    data = [f"{task}={world.data(task)}" for task in reversed(world.tasks)]
    spec = draft(asked, data, ["data.defaults.seed=3"], Path("unused")).spec
    assert spec.architecture.loader == "hf-clip" and spec.data.defaults.seed == 3
    assert {task: entry.file for task, entry in spec.data.tasks.items()} == {  # type: ignore[union-attr]
        task: str(world.data(task)) for task in world.tasks
    }
    assert not spec.heads  # classes have names, and nothing here reads them


def test_without_data_built_in_pictures_are_measured_and_no_accuracy_is_told(
    models: list[str], tmp_path: Path, run_cli: Cli
) -> None:
    done = run_cli("why", *models[:2], models[-1], "--out", tmp_path / "run")
    assert done.code == 0, done.err
    run = open_run(tmp_path / "run")
    assert "96 built-in drawn pictures" in done.err and f"with {models[-1]} as the merged model" in done.err
    assert "Relative drift" in done.out and "ccuracy" not in done.out
    assert run.accuracy().empty and run.layers()["final_share"].notna().any()
    with np.load(tmp_path / "run-probe.npz") as arrays:
        assert arrays["x"].shape[0] == probe.PICTURES


@pytest.mark.parametrize(("config", "samples"), [("ConvNextConfig", "npz"), ("AlbertConfig", "jsonl")])
def test_without_data_models_of_any_family_are_given_what_they_read(
    tmp_path: Path, config: str, samples: str
) -> None:
    places = [str(tmp_path / name) for name in ("base", "task", "merged")]
    for place in places:
        getattr(transformers, config)().save_pretrained(place)
    spec = draft(asked_about(places, None), (), (), tmp_path / "probe").spec
    assert (spec.architecture.loader, spec.data.tasks["task"].kind) == ("hf-auto", samples)


@pytest.mark.slow
@pytest.mark.parametrize("is_labelled", [True, False])
def test_a_recipe_is_followed_and_texts_are_judged_by_their_labels_where_they_have_some(
    is_labelled: bool, tmp_path: Path, run_cli: Cli
) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        saved(CONFIGS["Llama, untied"], tmp_path / name, seed)
    recipe: dict[str, Any] = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base")}
    recipe |= {
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": 0.4}} for name in ("one", "two")]
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    labels = {"target": ["yes", "no"]} if is_labelled else {}
    file = texts(tmp_path / "rows.jsonl", **labels)
    done = run_cli("why", tmp_path / "recipe.yaml", "--data", file, "--out", tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert (
        done.code == 0 and [*run.tasks] == ["one", "two"] and (tmp_path / "run-merged/config.json").exists()
    )
    assert ("Same answer as the expert" in done.out) != is_labelled
    assert {*run.accuracy()["metric"]} == ({"accuracy"} if is_labelled else set())


def test_a_spec_is_made_of_models_that_are_to_be_merged(
    world: World, models: list[str], tmp_path: Path, run_cli: Cli
) -> None:
    base, one, other, _ = models
    given = [base, f"autos={one}", other, f"--data={world.data(world.tasks[0])}"]
    done = run_cli("init", *given, "--out", tmp_path / "run.yaml")
    assert done.code == 0, done.err
    spec = load_spec(tmp_path / "run.yaml")
    assert spec.tasks == ("autos", world.tasks[1]) and spec.experts["autos"].weights == one
    assert spec.architecture.loader == "hf-clip" and spec.merge.method == "task_arithmetic"
    assert run_cli("validate", tmp_path / "run.yaml").code == 0
    done = run_cli("init", base, f"a={one}", f"a={other}", "--json")
    assert (done.code, "two tasks are called a" in done.message) == (2, True)


def test_the_spec_of_a_recipe_says_which_merge_is_nearest(tmp_path: Path, run_cli: Cli) -> None:
    for seed, name in enumerate(("base", "one", "two")):
        saved(CONFIGS["Llama, untied"], tmp_path / name, seed)
    recipe: dict[str, Any] = {"merge_method": "dare_ties", "base_model": str(tmp_path / "base")}
    recipe |= {
        "models": [{"model": str(tmp_path / name), "parameters": {"weight": 1}} for name in ("one", "two")]
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    rows = texts(tmp_path / "rows.jsonl")
    done = run_cli("init", tmp_path / "recipe.yaml", "--data", rows, "--json")
    made = json.loads(done.out)
    spec = yaml.safe_load(made["spec"])
    assert [*spec["experts"]] == ["one", "two"] and spec["base"]["weights"] == str(tmp_path / "base")
    assert spec["architecture"]["loader"] == "hf-decoder" and spec["merge"] == {"method": "dare"}
    assert "the recipe says dare_ties, and the spec dare" in made["chosen"][0]


def test_of_a_merge_of_two_neither_is_the_base(tmp_path: Path) -> None:
    for name in ("one", "two", "merged"):
        (tmp_path / name).mkdir()
    one, two, merged = (str(tmp_path / name) for name in ("one", "two", "merged"))
    pair = {"merge_method": "slerp", "base_model": two, "models": [{"model": one}], "parameters": {"t": 0.5}}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(pair))
    given = [str(tmp_path / "pair.yaml"), merged]
    asked = asked_about(given, recipe_in(given))
    assert asked.base is None and {*asked.experts.values()} == {one, two} and asked.merged == merged


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            lambda given: given[:2],
            "expected a base, one expert or more, and their merge, in this order; got 2",
        ),
        (lambda given: [*given[:-1], given[0]], "is given twice"),
        (lambda given: [*given[:-1], "nowhere"], "there is no file or folder nowhere"),
        (lambda given: [*given, "--data=a", "--data=b", "--data=c"], "--data is given 3 times for 2 experts"),
        (lambda given: [*given, "--data=rose=a"], "no expert is called 'rose'"),
        (lambda given: [*given, "--data=flowers=a"], "--data is missing for shapes"),
        (lambda given: [*given, "--data=nothing.csv"], "there is no file or folder nothing.csv"),
        (
            lambda given: [given[0].replace("/hf/", "/open_clip/") + ".safetensors", *given[1:]],
            "nothing beside",
        ),
        (lambda given: [given[0], given[1], given[2] + "/config.json"], "of an unknown kind"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(
    changes: Any, said: str, models: list[str], tmp_path: Path, run_cli: Cli
) -> None:
    done = run_cli("why", *changes(models), "--out", tmp_path / "run")
    assert (done.code in (2, 4), said in done.message, bool(done.hint)) == (True, True, True), done.err
    assert not (tmp_path / "run").exists()
    assert done.err.startswith("error: "), "nothing is told of samples before models are refused"


def test_columns_are_found_by_their_usual_names_or_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,sentence\nyes,it rains\n")
    assert (
        data_entry(tmp_path / "a.csv", reads="text").items()
        >= {"input": "sentence", "target": "label"}.items()
    )
    (tmp_path / "b.csv").write_text("label,words\nyes,it rains\n")
    with pytest.raises(SpecError, match="there are label, words"):
        data_entry(tmp_path / "b.csv", reads="text")
    (tmp_path / "notes.txt").write_text("it rains\n")
    with pytest.raises(SpecError, match="no data of a kind that is told by its name"):
        data_entry(tmp_path / "notes.txt", reads="text")
