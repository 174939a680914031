"""Live modules whose final output is one vector per token: scores are of pooled features, everywhere."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from driftlens.base.errors import DataError, SpecError
from driftlens.findings.reading import percent
from driftlens.models.chain import pooled
from tests.families import STACK
from tests.zoo.cases import perturbed, with_seed

CLASSES, WIDTH, N, LENGTH = ("cat", "dog", "fox"), 6, 9, 4


class Residual(nn.Module):
    """x + tanh(linear(x)), token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Tokens(nn.Module):
    """Tokens in, tokens out; padding is nobody's business but that of who pools."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def given(pool: Any) -> dict[str, Any]:
    base = with_seed(Tokens)().eval()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, LENGTH, WIDTH, generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor([4, 3, 2, 4, 3, 2, 4, 3, 2])[:, None]
    rows = nn.functional.normalize(torch.randn(3, WIDTH, generator=generator), dim=1)
    return {
        "merged": perturbed(base, 1, 0.3),
        "experts": {"task": perturbed(base, 2, 0.3)},
        "data": {"task": [({"x": x, "attention_mask": mask.long()}, torch.arange(N) % 3)]},
        "heads": {"task": dl.Head(CLASSES, rows, 10.0)},
        "pool": pool,
    }


@STACK
@pytest.mark.shows(heads="class embeddings")
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_scores_are_taken_behind_the_pooling(pool: Any, tmp_path: pathlib.Path) -> None:
    modules = given(pool)
    run = dl.analyze(
        **modules,
        out=tmp_path / "run",
        progress="none",
        jacobian=dl.JacobianSettings(samples=N),
        adjoint=True,
        groups=True,
    )
    ((batch, labels),) = modules["data"]["task"]
    head, mask = modules["heads"]["task"], batch["attention_mask"].bool()
    with torch.no_grad():
        outs = {"expert": modules["experts"]["task"](**batch), "merged": modules["merged"](**batch)}
        scores = {name: head.scores(pooled(out, pool, mask)) for name, out in outs.items()}
    for name, found in scores.items():
        hits = (found.argmax(dim=1) == labels).double().mean().item()
        assert run.accuracy(variant=name)["value"].tolist() == pytest.approx([hits]), name
    told = run.outputs(variant="merged")
    assert told["pred"].tolist() == [CLASSES[at] for at in scores["merged"].argmax(dim=1)]
    loss = [nn.functional.cross_entropy(found, labels, reduction="none") for found in scores.values()]
    drift = (outs["merged"] - outs["expert"]).masked_fill(~mask[..., None], 0)
    wanted = {"loss": loss[1] - loss[0], "final_drift": torch.ones(N)}
    # The stem has no parameters, so it has no groups.
    groups, layers = run.group_contributions(variant="merged"), run.layers(variant="merged").iloc[1:]
    sums = groups.groupby("layer")[["mismatch_share", "final_share"]].sum()
    assert sums["mismatch_share"].tolist() == pytest.approx([1.0] * len(layers))
    assert sums["final_share"].tolist() == pytest.approx(layers["final_share"].tolist(), abs=1e-5)
    assert groups["split_error"].between(0, 1e-5).all()
    rows = run.adjoint(variant="merged")
    assert bool((drift.flatten(1).norm(dim=1) > 0).all())
    for target, change in wanted.items():
        parts = rows[rows["target"] == target].groupby("sample_id", sort=False)
        assert parts["change"].first().tolist() == pytest.approx(change.tolist(), rel=1e-4, abs=1e-5)
        assert parts["part"].sum().tolist() == pytest.approx(change.tolist(), rel=1e-2, abs=1e-3)


@STACK
@pytest.mark.shows(heads="nn.Linear")
def test_a_linear_classifier_scores_a_calibration_too_at_first_look_as_well(tmp_path: pathlib.Path) -> None:
    modules = given("mean")
    linear = with_seed(lambda: nn.Linear(WIDTH, 3))()
    run = dl.analyze(**modules | {"heads": {"task": linear}}, out=tmp_path / "run", progress="none")
    ((batch, labels),) = modules["data"]["task"]
    with torch.no_grad():
        out = modules["merged"](**batch)
        scores = linear(pooled(out, "mean", batch["attention_mask"].bool()))
    hits = (scores.argmax(dim=1) == labels).double().mean().item()
    assert run.accuracy(variant="merged")["value"].tolist() == pytest.approx([hits])
    said: list[str] = []
    run = run.calibrate(dl.FeatCal(rho=1.0), name="x", on_first=said.append)
    (found,) = run.accuracy(variant="calibrated:x")["value"]
    assert f"x {percent(found)}" in said[0]


def test_an_unknown_pooling_is_refused_with_the_four_there_are(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SpecError, match="expected one of cls, mean, last, all; got 'avg'"):
        dl.analyze(**given("avg"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(SpecError, match="expected one of cls, mean, last, all"):
        pooled(torch.zeros(2, 3, 4), "avg")  # type: ignore[arg-type]


def test_a_head_that_does_not_fit_is_refused_before_a_run_is_begun(tmp_path: pathlib.Path) -> None:
    modules = given("mean") | {"heads": {"task": nn.Linear(WIDTH + 1, 3)}}
    with pytest.raises(
        DataError, match=f"the classifier reads {WIDTH + 1} features, the model gives {WIDTH}"
    ):
        dl.analyze(**modules, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "meta", "cuda"])
def test_a_device_that_is_not_there_is_said_so(device: str, tmp_path: pathlib.Path) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SpecError, match=f"there is no device '{device}' here"):
        dl.analyze(**given("mean"), device=device, out=tmp_path / "run")


PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/live.md"


@pytest.mark.slow  # test_live_calibrate.py goes the same way in pieces
def test_the_page_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert {"at-rho-1", "featcal"} == set(names["run"].manifest.calibrations)  # type: ignore[attr-defined]
    assert (tmp_path / "calibrated/model.safetensors").is_file()
    assert (tmp_path / "report/report.html").is_file()
