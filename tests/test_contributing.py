"""The four files of CONTRIBUTING.md work as they are printed there."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import driftlens as dl
from driftlens.calibration.calibrator import calibrators
from driftlens.cli import build_app
from driftlens.config.spec import load_spec
from driftlens.engine.calibrating import LinearProblem
from driftlens.linalg.ridge import LinearMoments
from driftlens.models.chain import Site, adapters
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.registry import diagnostics
from driftlens_reports.build import Report
from driftlens_reports.charts.chart import charts
from tests.pipelines.calibrating import copied
from tests.pipelines.fixtures import light, world
from tests.quick import temporary_entries
from tests.runs.full_run import write_full_run
from tests.zoo.small import scrambled
from tests.zoo.walking import chain_states, largest_difference
from tests.zoo.world import World

__all__ = ["light", "world"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES: dict[str, str] = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S))
"""Path in the repository -> source of each file on the page."""
REGISTRIES = (calibrators, diagnostics, charts, adapters)


@pytest.fixture
def added(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Load one file of the page as the import of its package would."""
    path = next(name for name in FILES if name.endswith(f"/{request.param}.py"))
    file = tmp_path / Path(path).name
    file.write_text(FILES[path], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"printed_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    with ExitStack() as stack:
        for registry in REGISTRIES:
            stack.enter_context(temporary_entries(registry))
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        yield


def printed(stem: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("added", [stem], indirect=True)


def test_there_is_one_file_for_each_kind_at_a_place_that_is_imported() -> None:
    """Registries import all modules of their package, so the folder decides whether a file is found."""
    folders = {str(Path(path).parent) for path in FILES}
    packages = ("calibration", "diagnostics", "models/architectures")
    assert folders == {*(f"driftlens/{name}" for name in packages), "reports/driftlens_reports/charts"}
    for path in FILES:
        assert (ROOT / path).parent.joinpath("__init__.py").is_file()
        assert not (ROOT / path).exists(), "the name on the page is free"


@printed("ridge")
def test_the_calibrator_minimizes_its_objective(added: None) -> None:
    """The gradient of E|W x - y|^2 + mu |W - W_merged|^2 vanishes at the solutions of two stacked modules."""
    generator = torch.Generator().manual_seed(0)
    x, y, merged = (torch.randn(*shape, generator=generator).double() for shape in ((40, 6), (40, 5), (5, 6)))
    moments = LinearMoments(x.mT @ x / 40, y.mT @ x / 40, x.mean(0), y.mean(0), None, torch.tensor(1.0))
    sites = tuple(Site(name, "linear", "x") for name in ("one", "two"))
    weights = {"one.weight": merged[:2], "two.weight": merged[2:]}
    updates = calibrators["ridge"](lam=0.3).solve(LinearProblem(sites, moments, {}, weights, None))
    solved = torch.cat([update.parameters[name] for update, name in zip(updates, weights, strict=True)])
    solved.requires_grad_()
    pull = 0.3 * x.square().mean()
    loss = (x @ solved.mT - y).square().sum() / 40 + pull * (solved - merged).square().sum()
    (gradient,) = torch.autograd.grad(loss, solved)
    assert gradient.abs().max() < 1e-12


@pytest.mark.slow
@printed("ridge")
def test_the_calibrator_runs_on_the_command_line(light: DriftRun, added: None, tmp_path: Path) -> None:
    """Its limit for a large ridge is the merged model."""
    folder = copied(light, tmp_path / "run")
    flags = ["--method", "ridge", "--no-attribution", "--name"]
    for name, lam in (("near", 1e9), ("far", 0.3)):
        shown = CliRunner().invoke(build_app(), ["calibrate", str(folder), *flags, name, "--set", f"lam={lam}"])
        assert shown.exit_code == 0, shown.output
    run = open_run(folder)
    assert run.manifest.calibrations["far"].settings == {"lam": 0.3}
    merged, near, far = (
        run.layers(variant=name)["drift_l2_mean"].to_numpy()
        for name in ("merged", "calibrated:near", "calibrated:far")
    )
    assert near == pytest.approx(merged, rel=1e-4) and far[-1] != pytest.approx(merged[-1], rel=1e-2)


@printed("mean_gap")
def test_the_diagnostic_measures_what_its_column_says(world: World, added: None, tmp_path: Path) -> None:
    spec = load_spec(world.one_task(metrics={"jacobian": False}), ["metrics.mean_gap=true"])
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    task = run.tasks[0]
    rows = run.layers(task, "merged")
    for layer, gap in zip(rows["layer"], rows["mean_gap"], strict=True):
        merged, expert = (np.asarray(run.features(task, name, layer), float) for name in ("merged", "expert"))
        # Stored features are rounded to float16.
        assert gap == pytest.approx(np.linalg.norm(merged.mean(0) - expert.mean(0)), rel=2e-2)


@printed("drift_profile")
def test_the_chart_plots_the_table_and_is_in_the_report(added: None, tmp_path: Path) -> None:
    run = open_run(write_full_run(tmp_path / "run"))
    drawn = charts["drift-profile"].draw(run)
    rows = run.layers()
    heights = np.concatenate([np.asarray(trace.y, float) for trace in drawn.figure.data])
    assert set(heights) <= set(rows["drift_l2_mean"]) and len(heights) > 0
    assert f"{max(heights):.3g}" in drawn.alt
    figures = Report(run, "standard").content.figures
    assert "drift-profile" in {figure.name for figure in figures}


def mixer() -> nn.Module:
    """Two blocks of width 16 on 16 x 16 pixels (16 tokens)."""
    from timm.models.mlp_mixer import MlpMixer

    return scrambled(lambda: MlpMixer(0, img_size=16, patch_size=4, num_blocks=2, embed_dim=16))


@printed("mixer")
def test_the_architecture_splits_a_model_into_layers_that_compute_the_same(added: None, tmp_path: Path) -> None:
    base = mixer()
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    double = copy.deepcopy(base).double()
    chain = adapters["mixer"].chain(double)
    own = chain_states(chain, double, images.double())
    assert largest_difference(own, chain.library_states(double, images.double())) < 1e-12
    with torch.no_grad():
        assert largest_difference(own[-1:], [{"hidden": double(images.double())}]) < 1e-12

    expert, merged = copy.deepcopy(base), copy.deepcopy(base)
    with torch.no_grad():
        for end, middle in zip(expert.parameters(), merged.parameters(), strict=True):
            end.mul_(1.2)
            middle.mul_(1.06)
    models = {"base": base, "merged": merged, "experts": {"pets": expert}}
    run = dl.analyze(**models, data={"pets": images}, out=tmp_path / "run", progress="none")
    assert run.manifest.architecture["adapter"] == "mixer"
    assert run.layers("pets", "merged")["drift_l2_mean"].gt(0).all()
