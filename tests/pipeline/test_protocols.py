"""Every protocol of the paper runs on a tiny suite and fills the exhibits that it promises, with what it measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from driftlens.cli import app
from driftlens.jobs.contest.arena import entrants, reproduce
from driftlens.runs.run import DriftRun, open_run
from driftlens.suites.reproduce import _SUITES, PROTOCOLS, Suite, filling, load_suite, suite_names
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, exhibits
from driftlens_reports.reproduced import Shown, shown
from tests.pipeline.calibrating import copied
from tests.quick import few
from tests.zoo.world import TASKS, World

Ran = Callable[[str], tuple[dict[str, DriftRun], Shown]]
QUICK = {*PROTOCOLS} - {"runtime", "main", "features", "ablations", "corruption", "samples", "sensitivity"}


@pytest.fixture(scope="module")
def suite(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Suite, Path]:
    spec = world.spec("hf")
    spec["data"]["defaults"] |= {"n": 4, "n_test": "all"}
    spec["metrics"] = {**spec["metrics"], "groups": True}
    for key in ("experts", "merge", "name"):
        del spec[key]
    tables = {"corruption": "tab:ta8-corrupted-calibration", "runtime": "tab:ta8-runtime-efficiency-n256"}
    written = {
        "title": "Two tiny CLIPs",
        "tasks": list(TASKS),
        "expert": f"{world.folder}/hf/{{task}}",
        "spec": spec,
        "mergers": {"average": {}, "task_arithmetic": {"scaling": 0.3}, "wudi": {"steps": 2}},
        "repairs": {"featcal": {}, "surgery": {"steps": 20}},
        "samples": [2, 4],
        "grids": {"lam": [0.05, 0.5], "rho": [1, 2], "alpha": [0, 0.3]},
        "corruptions": ["none", "gaussian_noise", "motion_blur", "fog", "jpeg:5"],
        "published": {"protocols": tables},
    }
    file = tmp_path_factory.mktemp("suite") / "tiny.yaml"
    file.write_text(yaml.safe_dump(written))
    return load_suite(str(file))


@pytest.fixture(scope="module")
def ran(suite: tuple[str, Suite, Path], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs a protocol, each in the same folder of runs as the others."""
    out, found = tmp_path_factory.mktemp("runs"), dict[str, tuple[dict[str, DriftRun], Shown]]()

    def run(protocol: str) -> tuple[dict[str, DriftRun], Shown]:
        if protocol not in found:
            runs, failed = reproduce(*suite, out, protocol=protocol)
            assert failed == {}
            names = [each.name for each in entrants([*PROTOCOLS[protocol].repairs(suite[1]).items()])]
            found[protocol] = runs, shown(suite[1], protocol, runs, names)
        return found[protocol]

    return run


def drawn(exhibit: str, runs: dict[str, DriftRun]) -> Exhibited:
    return exhibits[exhibit].draw(list(runs.values()), ExhibitOptions())


def test_every_exhibit_has_one_protocol_and_names_it_while_it_is_empty() -> None:
    promised = [name for of in PROTOCOLS.values() for name in of.exhibits]
    assert sorted(promised) == sorted(exhibits)
    assert {*_SUITES.values()} <= {*suite_names()}
    assert filling("corruption") == "driftlens reproduce SUITE --protocol corruption"
    assert filling("accuracy-full-l14-8") == "driftlens reproduce clip-l14-8 --protocol main"
    assert filling("of another package") == ""


@pytest.mark.parametrize("protocol", few(PROTOCOLS, QUICK, some={*PROTOCOLS} - {"ablations"}))
def test_a_protocol_fills_its_exhibits(protocol: str, ran: Ran) -> None:
    runs, told = ran(protocol)
    assert told.rows and told.sheets and all(sheet.rows for sheet in told.sheets)
    for name in PROTOCOLS[protocol].exhibits:
        found = drawn(name, runs)
        if name in _SUITES:  # of other models, or of twenty tasks
            assert filling(name) in found.missing[0].missing
            continue
        assert found.missing == () and len(found.data), name
        assert set(found.data["source"]) == {"measured"}
        words = found.latex or " ".join(at.get_text() for ax in found.figure.axes for at in ax.texts)  # type: ignore[union-attr]
        assert "reproduce" not in words


def test_the_merges_of_a_protocol_are_the_papers(suite: tuple[str, Suite, Path]) -> None:
    found = {name: of.of(suite[1]) for name, of in PROTOCOLS.items()}
    assert found.pop("main") == ["average", "task_arithmetic", "wudi"]
    assert found.pop("sensitivity") == ["task_arithmetic", "wudi"]
    assert {*map(tuple, found.values())} == {("task_arithmetic",)}
    alone = suite[1].model_copy(update={"mergers": {"ties": {}}})
    assert PROTOCOLS["samples"].of(alone) == ["ties"]


@pytest.mark.slow
def test_corrupted_points_stand_in_table_and_sheet_as_the_sweep_has_them(ran: Ran) -> None:
    runs, told = ran("corruption")
    rows = runs["task_arithmetic"].sweeps()
    rows = rows[rows["sweep"] == "surgery:corruption"]
    assert {*rows["settings"].str.contains('"steps": 20')} == {True}, "the suite's settings"
    means = rows.groupby("corruption")["accuracy"].mean()
    table = drawn("corruption", runs).data
    mine = table[table["variant"] == "calibrated:surgery"].set_index("column")["value"]
    heads = {"Clean": "none", "Gauss.": "gaussian_noise:3", "Blur": "motion_blur:3", "Fog": "fog:3"}
    for head, name in {**heads, "JPEG, severity 5": "jpeg:5"}.items():
        assert mine[head] == pytest.approx(100 * means[name])
    assert mine["Avg."] == pytest.approx(100 * means[[*heads.values()]].mean())
    said = {(row["model"], row["at"]): row for row in told.rows}
    assert said["surgery", "fog:3"]["value"] == pytest.approx(means["fog:3"])
    assert said["surgery", "fog:3"]["published"] == pytest.approx(0.694)
    assert said["featcal", "gaussian_noise:3"]["published"] == pytest.approx(0.766)
    assert said["featcal", "jpeg:5"]["published"] is None
    assert 0 <= said["featcal", "none"]["low"] < said["featcal", "none"]["value"]


@pytest.mark.slow
def test_numbers_of_samples_are_told_by_method_over_draws(ran: Ran) -> None:
    runs, told = ran("samples")
    rows = runs["task_arithmetic"].sweeps()
    rows = rows[~rows["sweep"].str.contains("corruption")]  # those of another protocol, if that ran before
    assert rows.groupby("sweep")["seed"].nunique().to_dict() == {"n": 3, "surgery:n": 3}
    for name, method in {"Surgery": "surgery:n", "FeatCal": "n"}.items():
        own = rows[(rows["sweep"] == method) & (rows["n"] == 2)].groupby("seed")["accuracy"].mean()
        line = drawn("efficiency", runs).data.query(f"row == 'Task Arithmetic w/ {name}' and column == 'n=2'")
        assert line["value"].item() == pytest.approx(100 * own.mean())
        assert line["spread"].item() == pytest.approx(100 * own.std())
        point = next(at for at in told.rows if (at["model"], at["at"]) == (name.lower(), 2))
        assert (point["value"], point["draws"]) == (pytest.approx(own.mean()), 3)
    seconds = rows[rows["sweep"] == "surgery:n"].drop_duplicates(["point", "seed"])["seconds"].mean()
    costs = drawn("resources", runs).data
    assert costs[costs["row"].str.contains("Surgery")]["value"].iloc[0] == pytest.approx(seconds)


@pytest.mark.slow
def test_costs_stand_beside_the_printed_ones(ran: Ran) -> None:
    runs, told = ran("runtime")
    made = runs["task_arithmetic"].manifest.calibrations
    assert [*made] == ["featcal", "surgery-steps-20"]
    times = {row["method"]: row for row in told.rows if row["cost"] == "Time (s)"}
    assert {name: row["published"] for name, row in times.items()} == {"featcal": 53.0, "surgery": 217.0}
    assert times["surgery"]["value"] == made["surgery-steps-20"].seconds
    memory = next(row for row in told.rows if row["cost"] == "CPU RSS (GiB)")
    assert 0.1 < memory["value"] < 64


@pytest.mark.slow
def test_the_main_table_tells_the_suites_calibrations_alone(suite: tuple[str, Suite, Path], ran: Ran) -> None:
    runs, told = ran("main")
    assert {row["model"] for row in told.rows} == {"base", "merged", "expert", "featcal", "surgery-steps-20"}
    few = shown(suite[1], "main", runs, ["featcal"]).rows
    assert {row["model"] for row in few} == {"base", "merged", "expert", "featcal"}
    assert pd.Series([row["merger"] for row in few]).nunique() == 4


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    """The commands that `export --all` ends with, and the exhibits that each is said to fill."""
    told = CliRunner().invoke(app, ["export", str(folder), "--all", "--format", "csv", "--out", str(out)])
    assert told.exit_code == 0, told.output
    lines = [
        line.removeprefix("for ").partition(": ")
        for line in told.stderr.splitlines()
        if ": driftlens " in line
    ]
    return {command: names.split(", ") for names, _, command in lines}


@pytest.mark.slow
def test_each_command_that_export_tells_fills_its_exhibits(light: DriftRun, tmp_path: Path) -> None:
    """A run without Jacobians and calibrations: what was done is told no more, and nothing in the end."""
    folder, ran = copied(light, tmp_path / "run"), list[str]()
    while told := commands(folder, tmp_path / "exhibits"):
        for command, names in told.items():
            assert command not in ran, f"{command} was run and did not fill {names}"
            ran.append(command)
            # The world has six samples a task, where people have hundreds.
            arguments = command.replace("n=8,16,32,64,128,256,512", "n=2,4").split()[1:]
            made = CliRunner().invoke(app, arguments)
            assert made.exit_code == 0, made.output
    assert {line.split()[1] for line in ran} == {"calibrate", "explain", "sweep", "arena"}
    own = {name for of in PROTOCOLS.values() for name in of.exhibits} - {*_SUITES}
    for name in own:
        found = exhibits[name].draw([open_run(folder)], ExhibitOptions())
        assert found.missing == () and {*found.data["source"]} == {"measured"}, name
