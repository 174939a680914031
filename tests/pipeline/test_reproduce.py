"""Published suites as data, and a tiny suite of the same form run from a folder laid out like the Hub's cache."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from transformers import AutoModelForCausalLM

from driftlens.base.errors import SpecError
from driftlens.base.settings import resolve
from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.featcal import PRESETS, FeatCal
from driftlens.runs.run import open_run
from driftlens.spec.published import find_published
from driftlens.suites.reproduce import Printed, hub_ids, load_suite, protocol_called, suite_names
from driftlens_reports.paper.exhibit import ExhibitOptions, exhibits
from driftlens_reports.paper.published import published_tables
from driftlens_reports.reproduced import _looked_up
from tests.forked import Forked
from tests.models.writing import train
from tests.quick import few
from tests.zoo.cases import perturbed
from tests.zoo.suite import CLASSES, PAIRS, Suite
from tests.zoo.world import TASKS, World


@pytest.mark.parametrize("name", suite_names())
def test_every_published_suite_is_a_spec_per_merge(name: str) -> None:
    _, suite, folder = load_suite(name)
    every = [*suite.tasks, *suite.more_tasks]
    spec = suite.run_spec(name, "task_arithmetic", folder)
    assert spec.merge is not None and spec.merge.parameters == {"scaling": 0.3}
    assert [*spec.experts] == sorted(every) and len(hub_ids(spec)) == len(every) + 1
    if name.startswith("clip"):
        assert all(map(find_published, every)) and len(spec.heads) == len(hub_ids(spec, "data"))
        assert len(every) == int(name.rpartition("-")[2])
    assert suite.published is None or not suite.published.table or suite.published.table in published_tables()
    repositories = {suite.expert, str(spec.architecture.source), str(spec.base.weights)}  # type: ignore[union-attr]
    if not name.startswith("clip"):
        repositories |= {str(getattr(at, "path", "")) for at in spec.data.tasks.values()}
    assert suite.revisions == dict.fromkeys(repositories), "nobody publishes one, and that is said"
    for method, settings in suite.repairs.items():
        resolve(calibrators[method], settings, method)


@pytest.mark.parametrize("name", [name for name in suite_names() if "-14" not in name and "-20" not in name])
def test_the_arena_and_the_spec_repair_a_suite_with_the_papers_settings(name: str) -> None:
    _, suite, folder = load_suite(name)
    spec = suite.run_spec(name, "task_arithmetic", folder)
    assert spec.calibration is not None and spec.calibration.preset is not None
    suited = FeatCal.suited.get(spec.architecture.loader, next(iter(PRESETS)))  # what `arena` starts from
    assert {**PRESETS[suited], **suite.repairs["featcal"]} == dict(PRESETS[spec.calibration.preset])


def test_a_pinned_revision_goes_to_every_place_that_reads_the_repository() -> None:
    _, suite, _ = load_suite("flan-t5-base")
    pinned = suite.model_copy(
        update={
            "revisions": {
                "google/flan-t5-base": "v1",
                "tanganke/flan-t5-base_glue-{task}": "main~2",
                "nyu-mll/glue": "abc",
            }
        }
    )
    spec = pinned.run_spec("t5", "task_arithmetic")
    assert spec.architecture.source == spec.base.weights == "google/flan-t5-base@v1"  # type: ignore[union-attr]
    assert spec.experts["rte"].weights == "tanganke/flan-t5-base_glue-rte@main~2"
    assert hub_ids(spec, "data") == ["nyu-mll/glue@abc"]
    assert {entry.revision for entry in spec.data.tasks.values()} == {"abc"}  # type: ignore[attr-defined]


def test_the_suites_rows_are_found_in_the_papers_tables() -> None:
    def printed(table: str, merger: str, method: str, task: str = "mean") -> tuple[float | None, str]:
        row = {"merger": merger, "method": method, "model": method, "task": task}
        return _looked_up(row, Printed(table=table))

    table = "tab:clip-vit-b32-results"
    assert printed(table, "task_arithmetic", "merged") == (67.5, "")
    assert printed(table, "", "base") == (48.2, "") and printed(table, "", "expert", "gtsrb") == (98.9, "")
    assert printed(table, "task_arithmetic", "featcal") == (85.5, "")
    assert printed(table, "task_arithmetic", "merged", "stanford-cars") == (55.7, "")
    value, note = printed("tab:clip-14task-b32-full", "", "expert", "pcam")
    assert value == 98.0 and note
    assert printed(table, "", "nothing") == (None, "")
    row = {"merger": "task_arithmetic", "method": "featcal", "model": "featcal", "task": "stsb"}
    large = Printed(table="tab:flan-t5-results", model="FLAN-T5-large")
    assert _looked_up(row, large) == (90.8, "")
    small = Printed(table="tab:flan-t5-results", model="FLAN-T5-base")
    assert _looked_up({**row, "method": "prob_surgery"}, small)[1], "its columns are known to be permuted"
    llama = Printed(table="tab:mergebench-llama-results", model="Llama-3.2-3B-Instruct")
    assert _looked_up({**row, "task": "gsm8k"}, llama)[0] == 78.0


def test_what_is_unknown_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="clip-b32-8, clip-l14-14"):
        load_suite("clip-b32-9")
    with pytest.raises(SpecError, match="no protocol is called 'mian'; there are main, features"):
        protocol_called("mian")
    file = tmp_path / "own.yaml"
    file.write_text("extends: clip-b32-8\ntitel: x\n")
    with pytest.raises(SpecError, match="titel"):
        load_suite(str(file))


@pytest.fixture
def hub(world: World, tmp_path: Path) -> Path:
    """A home of the Hub's cache with the world's three models in it."""
    for name in world.names:
        place = tmp_path / "home" / "hub" / f"models--tiny--clip_{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        shutil.copytree(world.weights(name, "hf"), place / "snapshots" / ("0" * 40))
    return tmp_path / "home"


def tiny(world: World, file: Path, published: Any) -> Path:
    spec = world.spec("hf")
    spec["data"]["defaults"] |= {"n": 4, "n_test": "all"}
    del spec["experts"], spec["merge"], spec["name"]
    spec["architecture"]["source"] = spec["base"]["weights"] = "tiny/clip_base"
    suite = {
        "title": "Two tiny CLIPs",
        "tasks": list(TASKS),
        "expert": "tiny/clip_{task}",
        "spec": spec,
        "mergers": {"average": {}, "task_arithmetic": {"scaling": 0.3}},
        "repairs": {"featcal": {}, "react": {}},
        "samples": [2, 4],
        "published": published,
    }
    file.write_text(yaml.safe_dump(suite))
    return file


def told(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(home.parent):
        variables = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
        process = Forked("reproduce", *arguments, module="tests.pipeline.hub_home", environment=variables)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.wait() or 0, out, err)


@pytest.mark.slow
def test_a_tiny_suite_runs_from_the_hubs_cache(world: World, hub: Path, tmp_path: Path) -> None:
    values = {"": {"expert": {"mean": 90.0}}, "average": {"merged": {"mean": 50.0, "shapes": 40.0}}}
    file = str(tiny(world, tmp_path / "tiny.yaml", {"values": values}))
    planned = told(hub, file, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert not plan["missing"] and all(size > 1000 for size in plan["models"].values())
    average = plan["runs"]["average"]
    assert average["calibrations"] == 2 and average["cost"]["disk_bytes"] > 0
    assert average["more"]["disk_bytes"] > 3 * 4000 and average["more"]["seconds"] > 0  # three models of it
    assert not (tmp_path / "runs").exists()

    made = told(hub, file, "--json", "--progress", "none")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    rows = {(row["merger"], row["model"], row["task"]): row for row in document["rows"]}
    assert document["failed"] == {}
    mergers, models, tasks = ("average", "task_arithmetic"), ("merged", "featcal", "react"), ("mean", *TASKS)
    expected = {(merger, model, task) for merger in mergers for model in models for task in tasks}
    assert rows.keys() == expected | {("", model, task) for model in ("base", "expert") for task in tasks}
    assert rows["average", "merged", "mean"]["published"] == 0.5
    assert rows["average", "merged", "shapes"]["published"] == 0.4
    assert rows["average", "featcal", "mean"]["published"] is None
    assert all(row["low"] <= row["value"] <= row["high"] for row in rows.values())

    again = told(hub, file, "--progress", "none")
    assert again.returncode == 0 and "published" in again.stdout, again.stderr
    bare = told(hub, str(tiny(world, tmp_path / "tiny.yaml", None)), "--progress", "none")
    assert bare.returncode == 0 and "difference" not in bare.stdout

    shutil.rmtree(hub / "hub" / "models--tiny--clip_shapes")
    short = told(hub, file, "--out", "other")
    assert short.returncode == 4 and "tiny/clip_shapes" in short.stderr
    lacking = told(hub, file, "--dry-run")
    assert lacking.returncode == 0 and "model tiny/clip_shapes: to be downloaded" in lacking.stdout


def cached(home: Path, kind: str, name: str, revision: str = "main") -> Path:
    """An empty snapshot of a repository in a home of the Hub's cache."""
    place, sha = home / "hub" / f"{kind}--tiny--{name}", f"{zlib.crc32(revision.encode()):040x}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(sha)
    (place / "snapshots" / sha).mkdir(parents=True)
    return place / "snapshots" / sha


def texts_in_cache(form: str, home: Path) -> dict[str, Any]:
    """A suite of texts whose models and data are in a home of the Hub's cache, the base under a tag alone."""
    suite = Suite(form, home.parent, learns=False)
    start = suite.model
    for name, revision in (("base", "v1"), ("pick", "main"), ("free", "main")):
        suite.model = start if name == "base" else perturbed(start, len(name), 0.2)
        suite.save(name)
        shutil.copytree(home.parent / name, cached(home, "models", name, revision), dirs_exist_ok=True)
    data = {}
    for task, rows, more in (("pick", [*CLASSES.items()], {"classes": True}), ("free", PAIRS, {})):
        folder = cached(home, "datasets", task)
        for split, part in (("train", rows[::2] * 4), ("test", rows)):
            lines = "".join(json.dumps({"input": ask, "target": say}) + "\n" for ask, say in part)
            (folder / f"{split}.jsonl").write_text(lines)
        data[task] = {"kind": "hf", "path": f"tiny/{task}", "calibration": "train", "test": "test"}
        data[task] |= {"input": "input", "target": "target", "metric": "exact_match", **more}
    loader = "hf-decoder" if form == "decoder" else "hf-t5"
    return {
        "title": "Two tiny language models",
        "tasks": ["pick", "free"],
        "expert": "tiny/{task}",
        "revisions": {"tiny/base": "v1", "tiny/{task}": None},
        "spec": {
            "architecture": {"loader": loader, "source": "tiny/base"},
            "base": {"weights": "tiny/base"},
            "data": {"defaults": {"n": 4, "n_diagnosis": 3, "batch_size": 3}, **data},
            "metrics": {"jacobian": False},
        },
        "mergers": {"task_arithmetic": {"scaling": 0.3}},
        "repairs": {"featcal": {}, "react": {}},
        "samples": [2, 4],
        "published": {"values": {"task_arithmetic": {"featcal": {"mean": 50.0}}}},
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", few(["encoder-decoder", "decoder"], (), some=()))
def test_a_tiny_suite_of_texts_runs_from_the_hubs_cache(form: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    file = tmp_path / "texts.yaml"
    file.write_text(yaml.safe_dump(texts_in_cache(form, home)))
    planned = told(home, str(file), "--dry-run", "--json", "--offline")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert {*plan["models"]} == {"tiny/base@v1", "tiny/pick", "tiny/free"} and not plan["missing"]
    made = told(home, str(file), "--json", "--progress", "none", "--offline")
    assert made.returncode == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["failed"] == {}
    rows = {(row["model"], row["task"]): row for row in document["rows"]}
    assert {model for model, _ in rows} == {"base", "merged", "expert", "featcal", "react"}
    assert rows["featcal", "mean"]["published"] == 0.5 and rows["merged", "mean"]["published"] is None
    swept = told(home, str(file), "--protocol", "samples", "--json", "--progress", "none", "--offline")
    assert swept.returncode == 0, swept.stderr
    points = {(row["model"], row["at"]) for row in json.loads(swept.stdout)["rows"]}
    assert points == {(method, n) for method in ("featcal", "react") for n in (2, 4)}
    run = open_run(tmp_path / "runs" / "texts" / "task_arithmetic")
    assert {*run.sweeps().query("method == 'react'")["n"]} == {2, 4}
    exhibit = "accuracy-llm" if form == "decoder" else "accuracy-text"
    for name in (
        exhibit,
        *["experts-llm"] * (form == "decoder"),
        "efficiency",
        "data-efficiency",
        "resources",
    ):
        found = exhibits[name].draw([run], ExhibitOptions())
        assert found.missing == () and len(found.data), name


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # as in test_lora
def test_experts_that_are_adapters_by_hub_id_are_those_that_peft_merges(tmp_path: Path) -> None:
    """Once adapters beside the base that the suite names, once the same experts saved whole, with the same result."""
    home = tmp_path / "home"
    suite = texts_in_cache("decoder", home)
    start = tmp_path / "base"
    for task, tuned in (("pick", ["q_proj", "v_proj"]), ("free", ["up_proj"])):
        model = AutoModelForCausalLM.from_pretrained(start)
        state = train(
            model, cached(home, "models", f"{task}_lora"), r=2, lora_alpha=0.1, target_modules=tuned
        )
        whole = AutoModelForCausalLM.from_pretrained(start)
        assert not whole.load_state_dict(state, strict=False).unexpected_keys
        whole.save_pretrained(cached(home, "models", f"{task}_whole"))
    runs = {}
    for kind in ("lora", "whole"):
        expert = f"tiny/{{task}}_{kind}"
        own = {"expert": expert, "revisions": {"tiny/base": "v1", expert: None}, "repairs": {"featcal": {}}}
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(suite | own))
        made = told(home, str(tmp_path / f"{kind}.yaml"), "--json", "--progress", "none", "--offline")
        assert made.returncode == 0 and json.loads(made.stdout)["failed"] == {}, made.stderr
        runs[kind] = open_run(tmp_path / "runs" / kind / "task_arithmetic")
    keys = ["task", "variant", "layer"]
    lora, whole = (runs[kind].layers().set_index(keys)["drift_l2_mean"] for kind in ("lora", "whole"))
    pd.testing.assert_series_equal(lora, whole, rtol=1e-4)
    merged = lora.xs("merged", level="variant").groupby("layer").min()
    assert (merged[merged.index > 1] > 0).all()
