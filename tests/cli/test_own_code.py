"""Models and data of the user's own from the command line: trusted functions, and what an installed package adds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import driftlens as dl
from driftlens.runs.run import DriftRun
from tests.cli.conftest import Cli
from tests.zoo.world import write_spec

NET = """
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])

    def forward(self, pixels):
        return self.blocks(self.stem(pixels))


def read(image):
    return torch.tensor(np.asarray(image.resize((4, 4)))).flatten() / 255.0


def load(source):
    return Net().eval(), read


def shades(split, count=24, classes=("low", "high")):
    numbers = np.random.default_rng(split == "test").integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)
    return [(image, classes[row % 2]) for row, image in enumerate(numbers)]
"""

PLUGIN = """
from typing import Literal

from driftlens.data.sources import SplitView, data_sources
from driftlens.models.architecture import Architecture, load_architecture, loaders
from driftlens.config.data import Entry, data_kinds
from driftlens.config.types import Count

import own_net


@loaders.register("toy-net")
def load_toy(request):
    from dataclasses import replace
    from driftlens.utils.distributed import Permissions
    found = load_architecture("python:own_net:load", request.source, access=Permissions(trust=True))
    return replace(found, loader="toy-net")


@data_kinds.register("shades")
class ShadesData(Entry):
    kind: Literal["shades"]
    count: Count = 24


@data_sources.register("shades")
def open_shades(entry, split, access):
    samples = own_net.shades(split, entry.count)
    ids = tuple(f"{split}/{row}" for row in range(len(samples)))
    label, read = (lambda row: samples[row][1]), (lambda row: samples[row][0])
    return SplitView(split, ids, ("high", "low"), label, read)
"""

FORWARD = (("stem", False), *((f"blocks.{block}.0", True) for block in range(3)))


def features(weights: dict[str, Tensor], images: np.ndarray[Any, Any]) -> Tensor:
    """What the net computes, written down once more."""
    hidden = torch.tensor(images).flatten(1) / 255.0
    for name, is_bent in FORWARD:
        hidden = hidden @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        hidden = torch.tanh(hidden) if is_bent else hidden
    return hidden


def pictures() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, (24, 4, 4, 3), dtype=np.uint8)


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """A spec of two experts of such a net; loader and data are left to the test."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "own_net.py").write_text(NET)
    generator = torch.Generator().manual_seed(0)

    def near(start: dict[str, Tensor], size: float) -> dict[str, Tensor]:
        return {key: v + size * torch.randn(v.shape, generator=generator) for key, v in start.items()}

    shapes = {"stem": (8, 48), **{f"blocks.{block}.0": (8, 8) for block in range(3)}}
    zeros = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    base = near(zeros | {f"{name}.bias": torch.zeros(8) for name in shapes}, 0.3)
    for name, state in {"base": base, "one": near(base, 0.1), "two": near(base, 0.1)}.items():
        save_file(state, tmp_path / f"{name}.safetensors")
    save_file({"weight": torch.randn(2, 8, generator=generator)}, tmp_path / "head.safetensors")
    head = {"linear": str(tmp_path / "head.safetensors"), "classes": ["low", "high"]}
    return {
        "version": 1,
        "base": {"weights": str(tmp_path / "base.safetensors")},
        "merge": {"method": "average"},
        "experts": {task: {"weights": str(tmp_path / f"{task}.safetensors")} for task in ("one", "two")},
        "heads": dict.fromkeys(("one", "two"), head),
        "metrics": {"jacobian": {"samples": 2}},
    }


def is_right(run: DriftRun, own: dict[str, Any], calibrated: Path) -> None:
    """The run's tables are those of the net by itself, with the weights that were saved too."""
    assert run.layers()["closure_error"].max() < 1e-4
    head = load_file(own["heads"]["one"]["linear"])["weight"]
    files = {task: entry["weights"] for task, entry in own["experts"].items()}
    labels = np.arange(24) % 2
    accuracy = run.accuracy().set_index(["task", "variant"])["value"]
    images = pictures()
    for task, file in files.items():
        for variant, place in (("expert", file), ("calibrated:featcal", calibrated)):
            found = (features(load_file(place), images) @ head.T).argmax(dim=1).numpy()
            assert accuracy[task, variant] == pytest.approx(np.mean(found == labels))
    drift = run.layers(layer="final").set_index(["task", "variant"])["drift_l2_mean"]
    for task, file in files.items():
        apart = features(load_file(calibrated), images) - features(load_file(file), images)
        assert drift[task, "calibrated:featcal"] == pytest.approx(apart.norm(dim=1).mean().item(), rel=1e-4)


@pytest.mark.slow
def test_a_trusted_function_loads_what_is_analyzed_and_calibrated(
    own: dict[str, Any], run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    own["architecture"] = {"loader": "python:own_net:load", "source": "any"}
    data = {"kind": "python", "target": "own_net:shades"}
    own["data"] = {"defaults": {"n": 24, "n_diagnosis": 24}, "one": data, "two": data}
    spec, out = write_spec(tmp_path / "spec.yaml", own), tmp_path / "run"
    refused = run_cli("analyze", spec, "--out", out)
    assert refused.code == 2 and "--trust-code" in refused.err and not out.exists()
    done = run_cli("analyze", spec, "--out", out, "--trust-code", "--progress", "none")
    assert done.code == 0, done.err
    saved = tmp_path / "calibrated.safetensors"
    given = ("--name", "featcal", "--save-weights", saved, "--progress", "none")
    assert run_cli("calibrate", out, *given).code == 2
    done = run_cli("calibrate", out, *given, "--trust-code")
    assert done.code == 0, done.err
    is_right(dl.open_run(out), own, saved)


@pytest.mark.slow
@pytest.mark.every
def test_a_loader_and_a_kind_of_data_come_from_an_installed_package(own: dict[str, Any], tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "toy_plugin.py").write_text(PLUGIN)
    about = site / "toy_plugin-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: toy-plugin\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(
        "[driftlens.loaders]\ntoy-net = toy_plugin\n[driftlens.data_sources]\nshades = toy_plugin\n"
    )

    def driftlens(*arguments: object) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "driftlens", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    own["architecture"] = {"loader": "toy-net", "source": "any"}
    own["data"] = {"defaults": {"n": 24, "n_diagnosis": 24}} | {
        task: {"kind": "shades", "count": 24} for task in ("one", "two")
    }
    spec, out, saved = write_spec(tmp_path / "spec.yaml", own), tmp_path / "run", tmp_path / "c.safetensors"
    odd = driftlens("analyze", spec, "--out", out, "--set", "data.one.colour=red")
    assert odd.returncode == 2 and "data.one.colour" in odd.stderr and "count" in odd.stderr
    assert "toy-plugin 0.1: data source shades" in driftlens("doctor").stdout
    for command in (
        ("analyze", spec, "--out", out),
        ("calibrate", out, "--name", "featcal", "--save-weights", saved),
    ):
        done = driftlens(*command, "--progress", "none")
        assert done.returncode == 0, done.stderr
    run = dl.open_run(out)
    assert run.manifest.versions["toy-plugin"] == "0.1"
    is_right(run, own, saved)
