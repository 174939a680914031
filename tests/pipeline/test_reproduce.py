"""Published suites as data, and a tiny suite of the same form run from a folder laid out like the Hub's cache."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import yaml

from driftlens.errors import SpecError
from driftlens.pipeline.search.reproduce import mergers_of
from driftlens.suites.published import find_published
from driftlens.suites.reproduce import Printed, hub_ids, load_suite, suite_names
from driftlens_reports.paper.published import published_tables
from driftlens_reports.reproduced import _looked_up
from tests.pipeline.fixtures import world
from tests.pipeline.world import TASKS, World

__all__ = ["world"]


@pytest.mark.parametrize("name", suite_names())
def test_every_published_suite_is_a_spec_per_merge(name: str) -> None:
    _, suite, folder = load_suite(name)
    assert all(map(find_published, [*suite.tasks, *suite.more_tasks]))
    spec = suite.run_spec(name, "task_arithmetic", folder)
    assert spec.merge is not None and spec.merge.parameters == {"scaling": 0.3}
    count = int(name.rpartition("-")[2])
    assert len(spec.experts) == len(spec.heads) == len(hub_ids(spec, "data")) == count
    assert len(hub_ids(spec)) == count + 1
    assert suite.published is None or suite.published.table in published_tables()


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


def test_what_is_unknown_is_refused_with_what_there_is(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SpecError, match="clip-b32-8, clip-l14-14"):
        load_suite("clip-b32-9")
    with pytest.raises(SpecError, match="no protocol is called 'mian'; there are main, samples"):
        mergers_of(load_suite("clip-b32-8")[1], "mian")
    file = tmp_path / "own.yaml"
    file.write_text("extends: clip-b32-8\ntitel: x\n")
    with pytest.raises(SpecError, match="titel"):
        load_suite(str(file))


@pytest.fixture
def hub(world: World, tmp_path: pathlib.Path) -> pathlib.Path:
    """A home of the Hub's cache with the world's three models in it."""
    for name in world.names:
        place = tmp_path / "home" / "hub" / f"models--tiny--clip_{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        shutil.copytree(world.weights(name, "hf"), place / "snapshots" / ("0" * 40))
    return tmp_path / "home"


def tiny(world: World, file: pathlib.Path, published: Any) -> pathlib.Path:
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


def told(home: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "driftlens", "reproduce", *arguments],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"},
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_tiny_suite_runs_from_the_hubs_cache(
    world: World, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    values = {"": {"expert": {"mean": 90.0}}, "average": {"merged": {"mean": 50.0, "shapes": 40.0}}}
    file = str(tiny(world, tmp_path / "tiny.yaml", {"values": values}))
    planned = told(hub, file, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert not plan["missing"] and all(size > 1000 for size in plan["models"].values())
    assert plan["runs"]["average"]["cost"]["disk_bytes"] > 0 and not (tmp_path / "runs").exists()

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


@pytest.mark.slow
def test_the_protocols_that_vary_something_fill_the_runs_sweeps(
    world: World, hub: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    file = str(tiny(world, tmp_path / "tiny.yaml", None))
    found = {}
    for protocol in ("samples", "ablations"):
        made = told(hub, file, "--protocol", protocol, "--json", "--progress", "none")
        assert made.returncode == 0, made.stderr
        found[protocol] = json.loads(made.stdout)["rows"]
    points = {(row["method"], row["n"], row["seed"]) for row in found["samples"]}
    assert {(method, n) for method, n, _ in points} == {(m, n) for m in ("featcal",) for n in (2, 4)}
    assert len({seed for *_, seed in points}) == 3
    assert any(row["sweep"].endswith("ablation") for row in found["ablations"])
    assert not (tmp_path / "runs" / "tiny" / "average").exists()
