"""`--no-attribution`, and `driftlens explain` behind it."""

from __future__ import annotations

import json
import pathlib
import re

from driftlens.runs.run import open_run
from tests.cli.conftest import Cli
from tests.zoo.world import World, write_spec


def test_attribution_is_left_out_and_added_later(
    world: World, spec_file: pathlib.Path, tmp_path: pathlib.Path, run_cli: Cli
) -> None:
    spec, out = write_spec(spec_file, world.one_task(metrics={"jacobian": {"samples": 2}})), tmp_path / "run"
    assert run_cli("analyze", spec, "--out", out, "--no-attribution", "--progress", "none").code == 0
    assert open_run(out).layers()["final_share"].isna().all()
    done = run_cli("calibrate", out, "--name", "featcal", "--no-attribution", "--progress", "none")
    first = next(line for line in done.err.splitlines() if line.startswith(world.tasks[0]))
    drifts = [
        open_run(out).layers(variant=variant, layer="final")["drift_l2_mean"].iloc[0]
        for variant in ("merged", "calibrated:featcal")
    ]
    told = [number for number, _ in re.findall(r"([\d.]+) (\([^)]*\))", first)][:2]
    assert told == [f"{drift:#.3g}" for drift in drifts], first
    assert open_run(out).layers()["final_share"].isna().all()
    shown = run_cli("explain", out, "--json", "--progress", "none")
    assert shown.code == 0 and json.loads(shown.out)
    shares = open_run(out).layers().groupby("variant")["final_share"].sum().drop("base")
    assert shares.between(0.99, 1.01).all() and len(shares) == 3
