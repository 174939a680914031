"""Entries from outside: the example package, once installed, is wherever a part of DriftLens would be."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from driftlens.runs.manifest import read_manifest
from tests.pipelines.fixtures import spec_file, world
from tests.runs.full_run import write_full_run
from tests.zoo.world import World, write_spec

__all__ = ["spec_file", "world"]

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "driftlens-example"

LISTS = """
import json, sys

from driftlens.runs.run import open_run
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import chart_names_by_heading

figures = Report(open_run(sys.argv[1]), "standard").content.figures
shown = [figure.missing or figure.title for figure in figures if figure.name == "drift-tail"]
print(json.dumps([chart_names_by_heading("layers")["Drift"], shown, "torch" in sys.modules]))

from driftlens.cli import main

main(["doctor", "--methods", "--json"])
"""


def python(site: Path, *arguments: object) -> str:
    """What a fresh interpreter prints that also looks for packages in `site`."""
    paths = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def laid_out(site: Path) -> Path:
    """The example as an installer leaves it: its modules, and beside them its entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    about = site / "driftlens_example-0.1.0.dist-info"
    about.mkdir(parents=True)
    (site / "driftlens_example").symlink_to(EXAMPLE / "driftlens_example")
    (about / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    offered = configparser.ConfigParser()
    offered.read_dict(project["entry-points"])
    with (about / "entry_points.txt").open("w") as file:
        offered.write(file)
    return site


@pytest.mark.slow
def test_the_example_is_found_in_the_lists_of_reports_pages_and_methods(tmp_path: Path) -> None:
    said = python(laid_out(tmp_path / "site"), "-c", LISTS, write_full_run(tmp_path / "run"))
    drawn, _, listed = said.partition("\n")
    page, shown, needs_torch = json.loads(drawn)
    assert page[-1] == "drift-tail" and shown == ["Tail of the drift"]
    assert not needs_torch, "what draws a run does without torch"
    method = json.loads(listed)["merge_methods"]["median"]
    assert method["title"] == "Median of Task Vectors"
    assert [*method["settings"]] == ["scaling"]


@pytest.mark.slow
@pytest.mark.every
def test_installed_by_pip_it_merges_what_a_spec_says(world: World, spec_file: Path, tmp_path: Path) -> None:
    for name in ("pip", "setuptools"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name}, which installs the example, is not here itself")
    source = shutil.copytree(EXAMPLE, tmp_path / "source")  # where the build leaves files
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", tmp_path / "site"]
    python(tmp_path / "site", "-m", "pip", "install", *options, source)
    merge = {"method": "median", "scaling": 0.5}
    spec = write_spec(spec_file, world.spec(merge=merge, metrics={"jacobian": False}, heads=None))
    driftlens = (tmp_path / "site", "-m", "driftlens")
    python(*driftlens, "analyze", spec, "--out", tmp_path / "run")
    given = ["--method", "median", "--set", "scaling=0.5", "--out", tmp_path / "merged.safetensors"]
    python(*driftlens, "merge", spec, *given)
    manifest = read_manifest(tmp_path / "run")
    assert manifest.merge["method"] == "median" and manifest.merge["parameters"] == {"scaling": 0.5}
    assert manifest.versions["driftlens-example"] == "0.1.0"

    merged, base, *experts = load_file(tmp_path / "merged.safetensors"), *map(world.state, world.names)
    name = "visual.transformer.resblocks.1.mlp.c_fc.weight"
    steps = torch.stack([expert[name] - base[name] for expert in experts]).sort(dim=0).values
    middle = (steps[(len(steps) - 1) // 2] + steps[len(steps) // 2]) / 2
    torch.testing.assert_close(merged[name], base[name] + 0.5 * middle)
