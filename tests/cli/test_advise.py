"""The advice of `driftlens show`: its numbers are the tables', and what it claims holds within their intervals."""

from __future__ import annotations

import json

import pytest
import torch

from driftlens.runs.run import DriftRun
from driftlens_reports.facts import layer_advice, layer_advice_text
from tests.cli.conftest import Cli
from tests.zoo.world import World


@pytest.mark.slow
def test_advice_is_that_of_the_tables(finished: DriftRun, run_cli: Cli) -> None:
    done = run_cli("show", finished.path, "--json")
    found = json.loads(done.out)["advice"]
    assert done.code == 0
    rows = finished.layers(variant="merged")
    shares = rows.groupby("layer")["final_share"].mean().sort_values(ascending=False)
    assert [row["layer"] for row in found["shares"]] == list(shares.index)
    assert [row["share"] for row in found["shares"]] == pytest.approx(list(shares))
    params = finished.params(variant="merged")
    params = params[params["scope"] == "layer"]
    cosines = params.groupby("path")["cos"].mean()
    conflicts = found["conflicts"]
    assert {row["path"]: row["cos"] for row in conflicts} == pytest.approx(dict(cosines))
    beyond = [row["cos"] - row["orthogonal"] for row in conflicts]
    assert beyond == sorted(beyond)
    text = run_cli("-v", "show", finished.path).out.partition("Layers to look at")[2].strip()
    assert text.startswith(finished.layer_name(shares.index[0])) and f"{conflicts[0]['cos']:#.3g}" in text


def test_a_conflict_is_a_cosine_below_that_of_right_angles_at_these_lengths(finished: DriftRun, world: World) -> None:
    """Of task vectors of unlike lengths right angles make less than those of one length: that alone is no conflict."""
    found = layer_advice(finished)
    name = "visual.transformer.resblocks.1."
    lengths = [
        torch.cat(
            [
                (world.state(task)[key] - start).flatten()
                for key, start in world.state("base").items()
                if key.startswith(name)
            ]
        ).norm()
        for task in world.tasks
    ]
    wanted = sum(lengths) / len(lengths) / torch.stack(lengths).norm()
    (row,) = (row for row in found["conflicts"] if row["path"].endswith("resblocks.1"))
    assert row["orthogonal"] == pytest.approx(float(wanted), rel=1e-4)
    for at, row in enumerate(found["conflicts"]):
        row |= {"cos": 0.6, "orthogonal": 0.7 if at == 0 else 0.5}
    total = len(found["conflicts"])
    text = layer_advice_text(found)
    assert f"conflict in 1 of {total} layers" in text and text.count("task vectors conflict (mean cosine") == 1
    found["conflicts"][0]["orthogonal"] = 0.6
    assert f"conflict in none of {total} layers" in layer_advice_text(found)


def test_no_layer_is_said_to_stand_out_whose_interval_overlaps(finished: DriftRun) -> None:
    found = layer_advice(finished)
    first, *others = found["shares"]
    for row in found["shares"]:
        row |= {"share_low": row["share"] - 1, "share_high": row["share"] + 1}
    assert "overlap" in layer_advice_text(found) and finished.layer_name(others[0]["layer"]) in layer_advice_text(
        found
    )
    first["share_low"] = max(row["share"] for row in others) + 2
    assert "All other intervals are lower." in layer_advice_text(found)
    first["share_low"] = float("nan")
    assert "Without intervals, another layer may contribute as much." in layer_advice_text(found)
