"""`driftlens why`: a spec made of models and data alone, the least analysis, and refusals that say what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from driftlens.config.spec import load_spec, parse_recipe
from driftlens.data.rows import infer_data_entry
from driftlens.demo import PROBES
from driftlens.pipelines.quickstart import COUNTS, draft_spec, models_by_role
from driftlens.runs.run import open_run
from driftlens.utils.errors import SpecError
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
    texts = Path(PROBES["text"][0]["test"]).read_text().splitlines()
    rows = [{**json.loads(text), **{name: values[at % len(values)] for name, values in more.items()}}
            for at, text in enumerate(texts)]  # fmt: skip
    place.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def test_experts_are_named_after_their_folders_and_data_go_with_them(world: World, models: list[str]) -> None:
    asked = models_by_role(models)
    assert [*asked.experts] == [*world.tasks] and (asked.base, asked.merged) == (models[0], models[-1])
    data = [f"{task}={world.data(task)}" for task in reversed(world.tasks)]
    spec = draft_spec(asked, data, ["data.defaults.seed=3"]).spec
    assert spec.architecture.loader == "hf-clip" and spec.data.defaults.seed == 3
    assert {task: entry.file for task, entry in spec.data.tasks.items()} == {  # type: ignore[union-attr]
        task: str(world.data(task)) for task in world.tasks
    }
    assert not spec.heads  # classes have names, and nothing here reads them


def test_without_data_a_checklist_of_the_files_is_printed_and_nothing_is_written(
    models: list[str], tmp_path: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_cli("why", *models, "--strict")
    assert (done.code, done.out.count("✗")) == (0, 0), done.out + done.err
    assert f"merged model: {models[-1]}" in done.out and "the merge keeps" in done.out and "--data" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}
    told = json.loads(run_cli("why", *models, "--json").out)
    assert told["kept"].keys() == {"flowers", "shapes"} and told["models"]["base"] == models[0]


def test_an_expert_in_the_place_of_the_merge_is_told_and_may_be_named(models: list[str], run_cli: Cli) -> None:
    *experts, last = models[:-1]
    done = run_cli("why", *experts, last, "--strict")
    assert done.code == 3 and "✗ kept" in done.out and "write TASK=MODEL" in done.out
    named = run_cli("why", *experts, f"shapes={last}", "--strict")
    assert named.code == 0 and "kept" not in named.out, named.out


def test_a_merge_that_equals_the_base_is_no_expert(models: list[str], run_cli: Cli) -> None:
    done = json.loads(run_cli("why", *models[:-1], f"{models[0]}/.", "--json").out)
    assert not done["is_like_expert"] and done["kept"]


def test_with_data_an_expert_in_the_place_of_the_merge_is_refused_after_the_roles(
    world: World, models: list[str], tmp_path: Path, run_cli: Cli
) -> None:
    """What was taken as what is printed first, and no verdict advises against an expert."""
    base, one, other, _ = models
    data = (f"--data={world.data(world.tasks[0])}", "--out", tmp_path / "run")
    done = run_cli("why", base, one, other, *data)
    assert done.code == 2 and "looks like an expert" in done.message and not (tmp_path / "run").exists()
    assert f"base: {base}" in done.out and f"merged model: {other}" in done.out and "Next" not in done.out
    assert f"why {base} {one} TASK={other} --data" in done.hint


def test_a_model_that_can_not_be_read_is_one_line_of_the_checklist(models: list[str], run_cli: Cli) -> None:
    done = run_cli("why", models[0], models[1], f"{models[2]}/config.json")
    assert done.code == 4 and "✗ merged model" in done.out and "expected a file of type" in done.out
    assert "✓ shared base" in done.out


@pytest.mark.parametrize(("config", "samples"), [("ConvNextConfig", "npz"), ("AlbertConfig", "jsonl")])
def test_without_data_models_of_any_family_are_given_what_they_read(tmp_path: Path, config: str, samples: str) -> None:
    places = [str(tmp_path / name) for name in ("base", "task", "merged")]
    for place in places:
        getattr(transformers, config)().save_pretrained(place)
    spec = draft_spec(models_by_role(places), (), ()).spec
    assert (spec.architecture.loader, spec.data.tasks["task"].kind) == ("hf-auto", samples)


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


@pytest.fixture
def llamas(tmp_path: Path) -> Path:
    """A folder with a base, two experts of it and their merge."""
    for seed, name in enumerate(("base", "one", "two", "merged")):
        saved(CONFIGS["Llama, untied"], tmp_path / name, seed)
    return tmp_path


def test_counts_of_samples_may_be_changed_and_fewer_samples_lower_them(llamas: Path, tmp_path: Path) -> None:
    lines = texts(tmp_path / "many.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:12]))
    data = [f"one={tmp_path / 'few.jsonl'}", f"two={tmp_path / 'many.jsonl'}"]
    asked = ["data.defaults.n_diagnosis=5", "data.defaults.n_test=20"]
    models = models_by_role([str(llamas / name) for name in ("base", "one", "two", "merged")])
    spec = draft_spec(models, data, asked).spec
    assert (spec.data.defaults.n_diagnosis, spec.data.defaults.n_test) == (5, 20)
    # A quarter of the 12 and 64 rows is for calibration.
    counts = {task: [entry.model_dump()[key] for key in COUNTS] for task, entry in spec.data.tasks.items()}
    assert counts == {"one": [3, None, 9], "two": [16, None, None]}


def written(folder: Path, **more: Any) -> str:
    """A recipe of the folder's models."""
    models = [{"model": str(folder / name), "parameters": {"weight": 1}} for name in ("one", "two")]
    recipe = {"merge_method": "dare_ties", "base_model": str(folder / "base"), "models": models} | more
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


def test_the_spec_of_a_recipe_says_which_merge_is_nearest(llamas: Path, run_cli: Cli) -> None:
    rows = texts(llamas / "rows.jsonl")
    done = run_cli("init", written(llamas, parameters={"density": 0.75}), "--data", rows, "--json")
    made = json.loads(done.out)
    spec = yaml.safe_load(made["spec"])
    assert [*spec["experts"]] == ["one", "two"] and spec["base"]["weights"] == str(llamas / "base")
    assert spec["architecture"]["loader"] == "hf-decoder"
    assert spec["merge"] == {
        "method": "ties",
        "scaling": 1,
        "density": 1,
        "merge_func": "sum",
        "drop_rate": 0.25,
    }
    assert "the recipe's dare_ties is replaced by ties, the nearest method" in made["chosen"][0]


TIES = {"method": "ties", "trim_scope": "per_tensor"}
NEAREST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "task_arithmetic": ({"weight": 0.4, "lambda": 0.5}, {"method": "task_arithmetic", "scaling": 0.2}),
    "ties": ({"weight": 3, "density": 0.3}, {**TIES, "scaling": 1.0, "density": 0.3}),
    "dare_linear": ({"weight": 0.5, "density": 0.9}, {"method": "dare", "scaling": 0.5, "drop_rate": 0.1}),
    "model_stock": ({}, {"method": "model_stock"}),
    "linear": ({"weight": 0.3}, {"method": "average"}),
    "sce": ({"select_topk": 0.5}, {"method": "task_arithmetic"}),
    "a method of tomorrow": ({}, {"method": "task_arithmetic"}),
}


@pytest.mark.parametrize("method", NEAREST)
@pytest.mark.parametrize("place", ["recipe", "models", "slices", "modules"])
def test_a_recipe_names_base_experts_and_the_nearest_merge(method: str, place: str) -> None:
    settings, merge = NEAREST[method]
    own = {} if place == "recipe" else {"parameters": {key: settings[key] for key in settings if key != "lambda"}}
    models: list[dict[str, Any]] = [
        {"model": "one", **own},
        {"model": {"model": {"path": "two", "revision": "v1"}, "lora": "adapter"}, **own},
    ]
    slices = [{"sources": [{**model, "layer_range": [0, 2]} for model in models]}]
    named = {"slices": {"slices": slices}, "modules": {"modules": {"default": {"models": models}}}}
    recipe = {
        "merge_method": method,
        "base_model": "base",
        "tokenizer_source": "union",
        "parameters": settings,
    }
    if place not in ("recipe", "slices", "modules"):
        recipe["parameters"] = {"lambda": settings["lambda"]} if "lambda" in settings else None
    found = parse_recipe(recipe | named.get(place, {"models": models}))
    assert (found.base, found.experts) == ("base", ("one", "two@v1+adapter"))
    assert found.merge == merge


def test_settings_that_experts_do_not_share_are_left_out() -> None:
    models = [{"model": name, "parameters": {"weight": at, "density": [0.1, at]}} for at, name in enumerate("ab")]
    found = parse_recipe({"merge_method": "dare_linear", "base_model": "base", "models": models})
    assert found.merge == {"method": "dare", "scaling": 1.0, "drop_rate": 0.0}


@pytest.mark.parametrize(
    ("method", "base", "merge"),
    [("slerp", "two", "slerp"), ("nearswap", "two", "average"), ("linear", None, "average")],
)
def test_of_a_merge_of_models_none_is_the_base(method: str, base: str | None, merge: str, tmp_path: Path) -> None:
    for name in ("one", "two", "merged"):
        (tmp_path / name).mkdir()
    one, two, merged = (str(tmp_path / name) for name in ("one", "two", "merged"))
    entries = [{"model": one}] + [{"model": two}] * (base is None)
    given = [written(tmp_path, merge_method=method, base_model=base and two, models=entries), merged]
    asked = models_by_role(given)
    assert asked.base is None and {*asked.experts.values()} == {one, two} and asked.merged == merged
    assert "names no base" in asked.chosen[0]
    assert models_by_role(given[:1], is_merged=False).merged == {"method": merge}


@pytest.mark.slow
@pytest.mark.parametrize("is_labelled", [True, False])
@pytest.mark.parametrize("is_made", [True, False], ids=["recipe alone", "recipe and merge"])
def test_a_recipe_is_measured_and_texts_are_judged_by_their_labels_where_they_have_some(
    is_made: bool, is_labelled: bool, llamas: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli
) -> None:
    program, told = llamas / "bin" / "mergekit-yaml", llamas / "told"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {told}\ncp -r {llamas}/merged "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    recipe, out = written(llamas), llamas / "run"
    labels = {"target": ["yes", "no"]} if is_labelled else {}
    given = [recipe] if is_made else [recipe, str(llamas / "merged")]
    done = run_cli("why", *given, "--data", texts(llamas / "rows.jsonl", **labels), "--out", out)
    run = open_run(out)
    assert done.code == 0 and [*run.tasks] == ["one", "two"], done.err
    assert ("Same answer as the expert" in done.out) != is_labelled
    assert {*run.accuracy()["metric"]} == ({"accuracy"} if is_labelled else set())
    assert told.exists() is is_made
    if is_made:
        assert told.read_text().split() == [recipe, f"{out}-merged", "--no-write-model-card"]


@pytest.mark.parametrize("is_there", [True, False], ids=["it fails", "it is not installed"])
def test_a_recipe_that_mergekit_does_not_merge_is_refused_with_what_to_run(
    is_there: bool, llamas: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli
) -> None:
    (llamas / "bin").mkdir()
    if is_there:
        (llamas / "bin" / "mergekit-yaml").write_text("#!/bin/sh\necho 'KeyError: t' >&2\nexit 1\n")
        (llamas / "bin" / "mergekit-yaml").chmod(0o755)
    monkeypatch.setenv("PATH", f"{llamas / 'bin'}:/usr/bin:/bin")
    recipe = written(llamas)
    done = run_cli("why", recipe, "--out", llamas / "run")
    assert done.code == 2 and ("KeyError: t" if is_there else "is not installed") in done.message, done.err
    assert f"mergekit-yaml {recipe}" in done.hint and not (llamas / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            lambda given: given[:1],
            "expected a base, one or more experts, in this order; got 1",
        ),
        (lambda given: [*given[:-1], given[0]], "is given twice"),
        (lambda given: [*given[:-1], "nowhere"], "there is no file or folder nowhere"),
        (lambda given: [*given, "--data=a", "--data=b", "--data=c"], "--data is given for flowers, shapes"),
        (lambda given: [*given, "--data=rose=a"], "--data is given for rose; the tasks are flowers, shapes"),
        (lambda given: [*given, "--data=nothing.csv"], "no file or folder nothing.csv"),
        (
            lambda given: (
                [place.replace("/hf/", "/open_clip/") + ".safetensors" for place in given[:2]]
                + [f"--data={given[-1]}"]
            ),
            "there is no configuration next to",
        ),
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
        infer_data_entry(tmp_path / "a.csv", reads="text").items() >= {"input": "sentence", "target": "label"}.items()
    )
    (tmp_path / "b.csv").write_text("label,words\nyes,it rains\n")
    with pytest.raises(SpecError, match="columns are label, words"):
        infer_data_entry(tmp_path / "b.csv", reads="text")
    (tmp_path / "notes.txt").write_text("it rains\n")
    with pytest.raises(SpecError, match="unrecognized data format"):
        infer_data_entry(tmp_path / "notes.txt", reads="text")
