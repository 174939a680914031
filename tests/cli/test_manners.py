"""How the command line talks: results on stdout, the rest on stderr, errors in two lines, options from everywhere."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pydantic
import pytest
import safetensors.torch
import torch

from driftlens.cli.app import handle_stop_signal
from driftlens.config.packaged import packaged_names
from driftlens.config.spec import load_spec
from driftlens.runs.run import DriftRun, open_run, resume_command
from driftlens.utils.errors import Cancelled, SpecError, add_error_context
from driftlens_reports.charts.chart import charts
from tests.cli.conftest import Cli
from tests.cli.worker import COMMAND
from tests.quick import few
from tests.zoo.world import TASKS, World, write_spec

COMMANDS = (
    *("demo", "init", "validate", "analyze", "merge", "attach", "calibrate", "sweep"),
    *(
        "report",
        "export",
        "view",
        "check",
        "compare",
        "ui",
        "show",
        "ls",
        "doctor",
    ),
)


@pytest.fixture
def quick(world: World, spec_file: Path) -> Path:
    """A spec that is analyzed in a moment."""
    return write_spec(spec_file, world.one_task(metrics={"jacobian": False}, heads=None))


def test_stdout_carries_the_result_and_stderr_plain_progress(run_cli: Cli, quick: Path, tmp_path: Path) -> None:
    done = run_cli("analyze", quick, "--out", tmp_path / "run", "--json")
    result = json.loads(done.out)
    assert result["tasks"] == [TASKS[0]] and {row["variant"] for row in result["final"]} == {"base", "merged"}
    drift = open_run(tmp_path / "run").value("drift_l2_mean", task=TASKS[0])
    assert [row["drift_l2_mean"] for row in result["final"] if row["variant"] == "merged"] == [drift]
    assert done.code == 0 and "\r" not in done.err and "\x1b" not in done.err
    # A slow machine adds lines in between, at most one in ten seconds.
    finished = [line for line in done.err.splitlines() if ": done in " in line]
    assert [line.split(":")[0] for line in finished] == ["merging", "measuring drift", "comparing weights"]


@pytest.mark.slow
def test_progress_as_json_is_one_object_per_line(run_cli: Cli, quick: Path, tmp_path: Path) -> None:
    result = run_cli("analyze", quick, "--out", tmp_path / "run", "--progress", "jsonl")
    events = [json.loads(line) for line in result.err.splitlines()]
    assert {event["phase"] for event in events} >= {"analyze", "params"}
    assert all(event["done"] <= event["total"] for event in events)
    assert result.out.startswith("tiny open_clip (") and "Relative drift" in result.out


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "place"), [("-q", "before"), ("--quiet", "behind")])
def test_quiet_says_nothing_but_the_result(run_cli: Cli, quick: Path, tmp_path: Path, flag: str, place: str) -> None:
    command = ["analyze", quick, "--out", tmp_path / "run", "--json"]
    result = run_cli(flag, *command) if place == "before" else run_cli(*command, flag)
    assert result.code == 0 and result.err == ""
    assert json.loads(result.out)["name"] == "tiny open_clip"


def test_an_error_is_two_lines_and_debug_adds_the_traceback(run_cli: Cli, tmp_path: Path) -> None:
    plain = run_cli("show", tmp_path)
    assert plain.code == 4 and plain.out == ""
    assert [line.split(": ")[0] for line in plain.err.splitlines()] == ["error", "hint"]
    debug = run_cli("show", tmp_path, "--debug")
    assert debug.err.startswith(plain.err) and "Traceback (most recent call last)" in debug.err
    assert "RunError" in debug.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "nosuch"),
        (["analyse", "run.yaml"], "analyse"),
        (["show"], "RUN"),
        (["ls", "--jsn"], "--json"),
        (["demo", "--seed", "many"], "--seed"),
        (["analyze", "run.yaml", "--progress", "loud"], "run.yaml"),
        (["calibrate", "run", "--preset"], "`driftlens calibrate --help`"),
        (["calibrate", "run", "--name", "a", "--set", "lam"], "--set scaling=0.4"),
        (["init", "--template", "generik", "--out", "-"], "Did you mean 'generic'?"),
    ],
)
def test_wrong_usage_is_exit_code_two_in_two_lines(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_cli(*arguments)
    assert (result.code, result.out) == (2, "")
    assert [line.split(": ")[0] for line in result.err.splitlines()] == ["error", "hint"]
    assert words in result.err and "defect" not in result.err


def test_no_command_shows_the_help(run_cli: Cli) -> None:
    result = run_cli()
    assert result.code == 2 and all(name in result.out for name in COMMANDS)
    assert "error" not in result.err


def test_an_error_nobody_foresaw_is_code_one_and_says_so(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftlens.cli.looking.environment_report", functools.partial(divmod, 1, 0))
    result = run_cli("doctor")
    assert result.code == 1 and "ZeroDivisionError" in result.message
    assert "bug in DriftLens" in result.hint and "--debug" in result.hint


def _misread_weights() -> None:
    safetensors.torch.load(b"no weights")


def _misread_json() -> None:
    with add_error_context("heads.json"):
        json.loads("{")


def _misread_text() -> None:
    b"\xff".decode()


def _misread_frame() -> None:
    pd.read_csv(io.StringIO("a,b\n1,2,3\n4,5,6,7"))


def _misread_record() -> None:
    pydantic.TypeAdapter(dict[str, int]).validate_python({"lam": "much"})


def _mismatched_weights() -> None:
    torch.nn.Linear(2, 3).load_state_dict(torch.nn.Linear(3, 3).state_dict())


def _mismatched_tensors() -> None:
    with add_error_context("layer 3"):
        torch.ones(2) @ torch.ones(3)


FOREIGN = {
    _misread_weights: (4, "SafetensorError", "safetensors"),
    _misread_json: (4, "heads.json: JSONDecodeError: Expecting property name", "json: check it"),
    _misread_text: (4, "can't decode byte 0xff", "Python"),
    _misread_frame: (4, "ParserError", "pandas"),
    _misread_record: (2, "lam: Input should be a valid integer", "Correct"),
    _mismatched_weights: (4, "size mismatch for weight", "torch"),
    _mismatched_tensors: (4, "layer 3: RuntimeError: inconsistent tensor size", "check it"),
}


@pytest.mark.parametrize(("fault", "told"), FOREIGN.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_an_error_of_a_library_about_its_input_is_no_defect(
    run_cli: Cli, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None], told: tuple[int, str, str]
) -> None:
    monkeypatch.setattr("driftlens.cli.looking.environment_report", fault)
    result = run_cli("doctor")
    code, message, hint = told
    assert result.code == code and message in result.message and hint in result.hint
    assert "Traceback" not in result.err and "defect" not in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "no_color",
    ["", "1"],
)
def test_colour_on_a_terminal_can_be_switched_off(tmp_path: Path, no_color: str) -> None:
    reader, terminal = pty.openpty()
    environment = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    process = subprocess.run([*COMMAND, "show", str(tmp_path)], stderr=terminal, env=environment, check=False)
    os.close(terminal)
    written = os.read(reader, 4096)
    os.close(reader)
    assert process.returncode == 4
    assert (b"\x1b[" in written) is (no_color == "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_with_its_default(run_cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run_cli(command, "--help")
    assert result.code == 0 and "--help" in result.out
    defaults = {
        "demo": ["driftlens-demo", "[default: text]"],
        "init": ["run.yaml", "[default: generic]"],
        "analyze": ["default: runs/<name>"],
        "ls": ["[default: .]"],
    }
    for words in defaults.get(command, []):
        assert words in result.out


def test_help_breaks_lines_where_the_terminal_ends(run_cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else: the next word would not have found room."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.strip() for line in run_cli("analyze", "--help").out.splitlines()]
    first = next(at for at, line in enumerate(lines) if line.startswith("Measure the drift"))
    text = lines[first : lines.index("", first)]
    assert len(text) > 1
    assert all(len(line) + len(after.split()[0]) > 77 for line, after in itertools.pairwise(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        (["--set", "data.defaults.n_diagnosis=2"], {}, {"n": 2}),
        (["--set", "data.defaults.seed=3"], {}, {"seed": 3}),
        pytest.param([], {"DRIFTLENS_DEVICE": "cpu"}, {"device": "cpu"}, marks=pytest.mark.slow),
        (["--device", "cpu"], {"DRIFTLENS_DEVICE": "nonsense"}, {"device": "cpu"}),
    ],
)
def test_values_of_the_spec_are_overridden(
    run_cli: Cli,
    quick: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    variable: dict[str, str],
    expected: dict[str, Any],
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    result = run_cli("analyze", quick, "--out", tmp_path / "run", *flags)
    assert result.code == 0, result.err
    run = open_run(tmp_path / "run")
    found = {
        "n": int(run.layers()["n"].iloc[0]),
        "seed": run.manifest.seeds["samples"],
        "device": run.manifest.device,
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("template", few(packaged_names("templates"), ["generic", "llama"]))
def test_init_writes_a_spec_that_can_be_read_and_overwrites_none(run_cli: Cli, spec_file: Path, template: str) -> None:
    assert run_cli("init", "--template", template, "--out", spec_file).code == 0
    assert load_spec(spec_file).tasks
    written = spec_file.read_bytes()
    assert run_cli("init", "--template", template, "--out", "-").out.encode().strip() == written.strip()
    spec_file.write_text("mine")
    refused = run_cli("init", "--template", template, "--out", spec_file)
    assert refused.code == 2 and "--force" in refused.hint and spec_file.read_text() == "mine"
    assert run_cli("init", "--template", template, "--out", spec_file, "--force").code == 0
    assert spec_file.read_bytes() == written


def test_commands_that_are_told_can_be_run_where_a_path_has_spaces(run_cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "my merges" / "a spec.yaml"
    out.parent.mkdir()
    told = run_cli("init", "--out", out).out
    assert shlex.split(told.rpartition("then: ")[2]) == ["driftlens", "validate", str(out)]
    recipe = out.with_name("a recipe.yml")
    recipe.write_text("merge_method: linear\nmodels: [{model: a}, {model: b}]\n")
    followed = shlex.split(run_cli("validate", recipe).hint.split("`")[1])
    assert followed == ["driftlens", "init", str(recipe)]
    analyzed = shlex.split(run_cli("why", out).hint.split("`")[1])
    assert analyzed == ["driftlens", "analyze", str(out)]
    run = tmp_path / "my runs"
    assert shlex.split(resume_command(run))[-4:] == [f"{run}/spec.yaml", "--out", str(run), "--resume"]


def test_a_run_is_shown_listed_and_verified(run_cli: Cli, finished: DriftRun) -> None:
    shown = json.loads(run_cli("show", finished.path, "--json").out)
    assert shown["id"] == finished.id and len(shown["accuracy"]) == len(finished.accuracy())
    text = run_cli("show", finished.path).out
    assert finished.id in text and all(task in text for task in TASKS)

    (listed,) = json.loads(run_cli("ls", finished.path.parent, "--json").out)
    assert listed["id"] == finished.id and listed["state"] == "done"
    final = {task: finished.value("drift_l2_mean", task=task) for task in TASKS}
    assert listed["final_drift"] == pytest.approx(final)
    assert finished.name in run_cli("ls", finished.path.parent).out

    verified = json.loads(run_cli("check", finished.path, "--json").out)["files"]
    assert verified["ok"] is True and verified["checked"] > 10 and verified["changed"] == []


def test_a_folder_without_runs_says_how_to_make_one(run_cli: Cli, tmp_path: Path) -> None:
    result = run_cli("ls", tmp_path)
    assert result.code == 0 and "driftlens demo" in result.out
    assert json.loads(run_cli("ls", tmp_path, "--json").out) == []


def test_doctor_reports_versions_as_json(run_cli: Cli) -> None:
    import torch

    found = json.loads(run_cli("doctor", "--json").out)
    assert found["torch"] == torch.__version__.split("+")[0] and "cores" in found["cpu"]
    assert all(name in run_cli("doctor").out for name in found)
    assert found["plugins"] == "none"


def test_doctor_lists_what_is_installed_from_elsewhere_and_what_of_it_is_broken(
    run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / "toys-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: toys\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text("[driftlens.charts]\nbars = toys\n[driftlens.chart]\npie = toys\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = SpecError("the charts are incomplete: toys of toys 1.2: no toys", hint="Mend it.")
    monkeypatch.setattr(charts, "_broken", broken)
    found = json.loads(run_cli("doctor", "--json").out)["plugins"]
    assert found.split("; ")[:2] == [
        "toys 1.2: pie in driftlens.chart, unknown",
        "toys 1.2: chart bars",
    ]
    assert "broken: the charts are incomplete: toys of toys 1.2" in found and "no toys" in found


def test_an_interrupt_waits_until_the_library_at_hand_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that swallows it, as some do, is whole afterwards, and the interrupt comes."""
    (tmp_path / "swallowing.py").write_text(
        "import os, signal\nfound = 'whole'\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    sum(range(10_000))\n"
        "except KeyboardInterrupt:\n    found = 'half'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGINT, handle_stop_signal)
    try:
        assert importlib.import_module("swallowing").found == "whole"
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(60)
    finally:
        signal.signal(signal.SIGINT, before)


JOBS = {
    "analyze": ("driftlens.pipelines.analyze.analyze", ("{spec}",)),
    "calibrate": ("driftlens.pipelines.calibrate.calibrate", ("run", "--name", "x")),
    "sweep": ("driftlens.pipelines.sweep.sweep", ("run", "--param", "lam=0.1")),
    "validate": ("driftlens.pipelines.validate.preflight", ("{spec}",)),
    "demo": ("driftlens.pipelines.analyze.analyze", ("--out", "demo")),
}


@pytest.fixture
def spec(world: Any, spec_file: Path) -> Path:
    from driftlens.config.spec import load_spec

    spec_file.write_text(load_spec(world.spec()).dump())
    return spec_file


@pytest.mark.parametrize("command", few(JOBS, ["analyze", "calibrate"]))
def test_the_option_decides_before_the_variable(
    command: str, spec: Path, run_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, arguments = JOBS[command]
    found: list[int] = []

    def job(*_: Any, **__: Any) -> None:
        found.append(torch.get_num_threads())
        raise Cancelled("cancelled")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(spec.parent)
    monkeypatch.setattr(place, job)
    monkeypatch.setattr("driftlens.runs.manifest.read_manifest", lambda run: None)
    given = [part.format(spec=spec) for part in arguments]
    before = torch.get_num_threads()
    assert run_cli(command, *given, "--threads", 2).code == Cancelled.exit_code
    monkeypatch.setenv("DRIFTLENS_THREADS", "3")
    run_cli(command, *given)
    run_cli(command, *given, "--threads", 2)
    assert found == [2, 3, 2] and torch.get_num_threads() == before
    assert run_cli(command, *given, "--threads", 0).code == 2


def test_help_does_not_wait_for_pydantic() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "driftlens", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not {"pydantic", "numpy", "yaml"} & {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_a_shell_completes_the_flags_of_a_command() -> None:
    words = {"COMP_WORDS": "driftlens calibrate --sampl", "COMP_CWORD": "2", "_DRIFTLENS_COMPLETE": "complete_bash"}
    done = subprocess.run(COMMAND, env=os.environ | words, capture_output=True, text=True)
    assert done.stdout.split() == ["--samples"]
