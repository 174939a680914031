"""A kinked activation: the quadrature says that it has not converged, with its error; a smooth one stays silent."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor, nn

import driftlens as dl
from tests.zoo.cases import perturbed, with_seed


class Blocks(nn.Module):
    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 12), activation(), nn.Linear(12, 12)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def analysed(activation: type[nn.Module], out: pathlib.Path) -> dl.DriftRun:
    base = with_seed(lambda: Blocks(activation))().double()
    data = torch.randn(6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dl.analyze(
        base=base,
        merged=perturbed(base, 1, scale=0.4),
        experts={"a": perturbed(base, 2, scale=0.4)},
        data={"a": data},
        jacobian=dl.JacobianSettings(nodes=4, max_nodes=16, tolerance=1e-5, samples=6),
        out=out,
        progress="none",
    )


def test_a_kink_is_said_with_its_error(tmp_path: pathlib.Path) -> None:
    run = analysed(nn.ReLU, tmp_path / "run")
    (warning,) = run.manifest.warnings
    worst = run.layers(variant="merged").set_index("layer")["jacobian_error"].astype(float)
    assert "misses the tolerance 1e-05" in warning and "after 16 nodes" in warning
    assert f"layer {worst.idxmax()} (error {worst.max():.1e})" in warning
    head = run.layers(variant="merged", layer="final")
    shares = run.layers(variant="merged")["final_share"].sum() + head["remainder_share"].sum()
    assert shares == pytest.approx(1, abs=1e-9)
    assert abs(float(head["remainder_share"].iloc[0])) > 1e-6


def test_a_smooth_activation_raises_nothing(tmp_path: pathlib.Path) -> None:
    assert analysed(nn.Tanh, tmp_path / "run").manifest.warnings == []
