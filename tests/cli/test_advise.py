"""`driftlens advise`: its numbers are the tables', and what it claims holds within their intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from driftlens.runs.run import DriftRun
from driftlens_reports.facts import advice, advice_text
from tests.cli.conftest import Cli
from tests.zoo.world import NUM_TEST, World, clip, pixels, write_spec


@pytest.mark.slow
def test_advice_is_that_of_the_tables(finished: DriftRun, run_cli: Cli) -> None:
    done = run_cli("advise", finished.path, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["scalings"] == []
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
    text = run_cli("advise", finished.path).out
    assert text.startswith(finished.layer_name(shares.index[0])) and f"{conflicts[0]['cos']:#.3g}" in text


def test_a_conflict_is_a_cosine_below_that_of_right_angles_at_these_lengths(
    finished: DriftRun, world: World
) -> None:
    """Of task vectors of unlike lengths right angles make less than those of one length: that alone is no conflict."""
    found = advice(finished)
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
    text = advice_text(found)
    assert (
        f"conflict in 1 of {total} layers" in text
        and text.count("follows the experts' less than they would") == 1
    )
    found["conflicts"][0]["orthogonal"] = 0.6
    assert f"conflict in none of {total} layers" in advice_text(found)


def test_no_layer_is_said_to_stand_out_whose_interval_overlaps(finished: DriftRun) -> None:
    found = advice(finished)
    first, *others = found["shares"]
    for row in found["shares"]:
        row |= {"share_low": row["share"] - 1, "share_high": row["share"] + 1}
    assert "overlap" in advice_text(found) and finished.layer_name(others[0]["layer"]) in advice_text(found)
    first["share_low"] = max(row["share"] for row in others) + 2
    assert "all other layers lie below" in advice_text(found)
    first["share_low"] = float("nan")
    assert "can't be told" in advice_text(found)


@pytest.mark.slow
def test_a_layer_that_was_moved_too_far_is_scaled_back(
    world: World, spec_file: Path, tmp_path: Path, run_cli: Cli
) -> None:
    """One expert, merged whole but for a layer that was moved half as far again: the search goes towards the expert."""
    from safetensors.torch import save_file

    task = world.tasks[0]
    base, expert = world.state("base"), world.state(task)
    name = "visual.transformer.resblocks.1."
    merged = {
        key: value + (0.5 * (value - base[key]) if key.startswith(name) else 0)
        for key, value in expert.items()
    }
    save_file(merged, tmp_path / "merged.safetensors")
    values = world.one_task(merge=None, merged={"weights": str(tmp_path / "merged.safetensors")})
    entry = values["data"][task]
    entry["calibration"] = {"file": entry["file"], "x": "x_test", "y": "y_test"}
    entry["test"] = {"file": entry.pop("file"), "x": "x_train", "y": "y_train"}
    values["data"]["defaults"]["n"] = NUM_TEST
    run = tmp_path / "run"
    assert run_cli("analyze", write_spec(spec_file, values), "--out", run).code == 0
    done = run_cli("advise", run, "--search", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    by_layer = {row["layer"]: row for row in found["scalings"]}
    assert found["shares"][0]["layer"] == 3 and by_layer[3]["scale"] == 0.75
    assert "one expert" in run_cli("advise", run).out and "samples held out" in advice_text(found)
    half = {
        key: base[key] + (0.75 * (merged[key] - base[key]) if key.startswith(name) else value - base[key])
        for key, value in expert.items()
    }
    images = pixels(world.data(task), [f"test/{at}" for at in range(NUM_TEST)])
    with torch.no_grad():
        drifts = [
            (clip(model).double().encode_image(images) - clip(expert).double().encode_image(images)).norm(
                dim=1
            )
            for model in (merged, half)
        ]
    assert (drifts[1].mean() < drifts[0].mean()) and by_layer[3]["advantage"] > 0
