"""The verdict's words against tables of every kind: no word that its interval doesn't support, no number of its own."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import assume, given, settings, strategies as st

from driftlens.results.verdict import (
    ModelGap,
    Verdict,
    format_gap,
    headline,
    headline_sentence,
    hide_run_path,
    other_models_table,
    task_table,
    verdict,
)
from driftlens.runs.manifest import Manifest, read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.schema import TABLES
from driftlens.runs.tables import conform_to_schema
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import display_name
from driftlens_reports.sections import report_verdict
from driftlens_reports.terminal import run_summary_text, table_text
from tests.runs.drawn_runs import (
    CAL,
    CONTROL,
    OTHER,
    PAIRS,
    SHARES,
    Right,
    best_repair,
    interval,
    run_of,
    tables,
)
from tests.runs.full_run import Size, write_full_run, write_run
from tests.runs.judged import at
from tests.runs.scored_run import write_scored_run
from tests.runs.strangers import BY_LAYER, NUM, RUNS, stranger


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(write_run(tmp_path_factory.mktemp("verdict") / "run"))


def said_of(found: Verdict, variant: str) -> str:
    return next(
        (text for text in found.sentences if re.match(rf"{display_name(variant)}( \(best of [^)]*\))?:", text)),
        "",
    )


def called(variant: str) -> str:
    return "experts" if variant == "expert" else display_name(variant)


@pytest.mark.slow
@settings(max_examples=10)
@given(made=tables(), drawn=SHARES, stored=st.booleans())
def test_words_follow_the_tables_in_every_branch(
    manifest: Manifest, made: tuple[Right, int], drawn: Mapping[int, Sequence[float]], stored: bool
) -> None:
    follows_the_tables(manifest, *made, drawn, stored=stored)


@pytest.mark.slow
@settings(max_examples=60)
@given(made=tables(most_tasks=5), drawn=SHARES, stored=st.booleans())
def test_words_follow_more_tables(
    manifest: Manifest, made: tuple[Right, int], drawn: Mapping[int, Sequence[float]], stored: bool
) -> None:
    follows_the_tables(manifest, *made, drawn, stored=stored)


def follows_the_tables(
    manifest: Manifest, right: Right, n: int, drawn: Mapping[int, Sequence[float]], *, stored: bool
) -> None:
    """Every sentence of the verdict on a run of these tables says what they say, and no more."""
    shares = {layer: (at, at - down, at + up) for layer, (at, down, up) in drawn.items()}
    run = run_of(manifest, right, n, shares, stored=stored)
    found, tasks = verdict(run), run.tasks
    models = dict.fromkeys(model for _, model in right)
    text, last = "\n".join(found.sentences), best_repair(right, n, stored=stored) or "merged"
    hidden = {CONTROL, *({OTHER, CAL} - {last})} & {*models}
    other_means = next((text for text in found.sentences if text.startswith("Other calibrations: ")), "")
    assert all(display_name(model) in other_means for model in hidden - {CONTROL})
    assert len(found.sentences) <= 15 and "nan" not in text
    for model in models:
        mean = 100 * sum(right[task, model] for task in tasks) / n / len(tasks)
        told = re.findall(rf"\b{re.escape(called(model))} ([\d.]+) %", found.sentences[0])
        if model in hidden:
            rest = text.replace(other_means, "")
            assert not told and not re.search(rf"\b{re.escape(display_name(model))}\b", rest)
        else:
            assert [abs(float(at) - mean) < 0.0501 for at in told] == [True]
    for variant, against in PAIRS:
        pair = (last if variant == CAL else variant, against)
        if not set(pair) <= set(models) or (variant == CAL and last == "merged"):
            assert last == "merged" or f"than {called(pair[1])}" not in said_of(found, pair[0])
            continue
        low, high = interval(right, n, pair, tasks, stored=stored)
        assume(min(abs(low), abs(high)) > 1e-9)
        way = "better than" if low > 0 else "worse than" if high < 0 else "no significant difference from"
        said = said_of(found, pair[0])
        claims = re.findall(rf"(better than|worse than|no significant difference from) {called(pair[1])}\b", said)
        assert claims == [way]
        holds_its_interval(said, called(pair[1]), low, high)
    if "base" in models:
        pair = ("expert", "base")
        bad = [task for task in tasks if interval(right, n, pair, [task], stored=stored)[1] < 0]
        assert list(found.bad_experts) == bad and ("Experts worse than base" in text) == bool(bad)
    is_behind = interval(right, n, (last, "expert"), tasks, stored=stored)[1] < 0
    better = "merge" if len(tasks) > 1 else "calibrate"
    command = "validate" if found.bad_experts else better if is_behind else "report"
    assert found.command.split()[1] == command and f"Next: `{found.command}`." in found.sentences
    if found.worst:
        assert interval(right, n, (last, "expert"), [found.worst], stored=stored)[1] < 0
    assert ("best of 2 calibrations" in text) == (OTHER in models)
    if shares:
        top = max(shares, key=lambda layer: shares[layer][0])
        down, up = ([abs(shares[at][0] - shares[at][end]) / math.sqrt(len(tasks)) for at in shares] for end in (1, 2))
        ends = {at: (shares[at][0] - d, shares[at][0] + u) for at, d, u in zip(shares, down, up, strict=True)}
        assume(all(abs(ends[at][1] - ends[top][0]) > 1e-9 for at in shares))
        is_clear = all(ends[at][1] < ends[top][0] for at in shares if at != top)
        assert found.source is not None and shares[found.source.layer][0] == shares[top][0]
        source = next(said for said in found.sentences if said.startswith("Main source of merged's drift: "))
        assert ("(too close to call)" in source) != is_clear
        assert found.source.name in source
    else:
        assert "source" not in text
    sheet = task_table(run, found)
    assert not found.gaps or ("not paired" in sheet.note) != stored
    assert [row[0] for row in sheet.rows[: len(tasks)]] == list(tasks)
    assert [row[0] for row in other_models_table(run, found).rows] == [
        display_name(model) for model in run.variants if model in hidden
    ]


NEAR = 0.1001
"""Two roundings, in points."""


def holds_its_interval(said: str, against: str, low: float, high: float) -> None:
    """What a sentence prints beside a change holds all of its interval, and 0 only where that does."""
    number = r"([+-]?[\d.]+)"
    ends = sorted(abs(100 * end) for end in (low, high)) if low > 0 or high < 0 else [100 * low, 100 * high]
    told = rf"{number} (?:\+- {number}|\({number} to {number}\))(?: points)? \w+ than {against}\b"
    unclear = rf"no significant difference from {against} \({number} \+- {number}()()\b"
    ((value, half, first, last),) = re.findall(told, said) or re.findall(unclear, said)
    if half:
        assert float(value) - float(half) < ends[0] + NEAR and ends[1] - NEAR < float(value) + float(half)
        assert low <= 0 <= high or float(half) < float(value)
    else:
        assert [float(first), float(last)] == pytest.approx(ends, abs=NEAR)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Interval(-0.1279, -0.1395, -0.1177), "12.8 +- 1.2"),
        (Interval(0.0615, 0.0528, 0.0721), "6.2 +- 1.1"),
        (Interval(0.031, 0.002, 0.059), "3.1 +- 2.9"),
        (Interval(0.031, 0.002, 0.063), "3.1 (0.2 to 6.3)"),
        (Interval(-0.031, -0.063, -0.002), "3.1 (0.2 to 6.3)"),
        (Interval(-0.013, -0.031, 0.006), "-1.3 +- 1.9"),
        (Interval(0.031), "+3.1"),
    ],
)
def test_half_of_an_interval_is_the_longer_and_reaches_zero_only_where_it_does(change: Interval, words: str) -> None:
    side = (change.low > 0) - (change.high < 0)
    gap = ModelGap("merged", "base", change, {}, side, (), ())
    assert format_gap(gap, "share") == words


@pytest.mark.parametrize(
    ("right", "command"),
    [
        (at(base=[50, 50], expert=[95, 95], merged=[60, 60]), "merge"),
        (at(expert=[95], merged=[60]), "calibrate"),
        (at(base=[50, 50], expert=[95, 95], merged=[95, 95]), "report"),
        (at(base=[90, 50], expert=[60, 95], merged=[60, 60]), "validate"),
        (at(expert=[95, 95], merged=[60, 60], cal=[95, 94]), "report"),
        (at(expert=[95, 95], merged=[90, 90], cal=[30, 30]), "merge"),
    ],
)
def test_the_next_step_fits_what_was_found(manifest: Manifest, right: Right, command: str) -> None:
    found = verdict(run_of(manifest, {key: 4 * k for key, k in right.items()}, 400, {}))
    assert found.command.startswith(f"driftlens {command} nowhere") and f"`{found.command}`" in found.sentences[-1]


def test_no_command_for_live_modules_nor_a_choice_twice_nor_one_on_a_stopped_run(manifest: Manifest) -> None:
    run = run_of(manifest, at(expert=[380], merged=[300], cal=[200]), 400, {})
    info = dataclasses.replace(run.manifest.calibrations["cal"], automatic=True)
    tried = DriftRun(run.path, dataclasses.replace(run.manifest, calibrations={"cal": info}))
    residual = dataclasses.replace(info, method="residual")
    other = DriftRun(run.path, dataclasses.replace(run.manifest, calibrations={"cal": residual}))
    live = DriftRun(run.path, dataclasses.replace(run.manifest, architecture={"loader": "live"}))
    stopped = DriftRun(run.path, dataclasses.replace(run.manifest, finished=None))
    for changed in (tried, other, live, stopped):
        changed._frames |= run._frames
    assert verdict(stopped).command == "driftlens analyze nowhere/spec.yaml --out nowhere --resume"
    assert verdict(tried).command == "driftlens sweep nowhere --param alpha=0.15,0.3,0.6"
    assert verdict(other).command == "driftlens report nowhere"
    assert verdict(live).command == "" and not any("Next" in text for text in verdict(live).sentences)


@pytest.mark.parametrize(("second", "rivals"), [(0.1, ()), (0.9, ("block 1 (layer 3 of 4)",))])
def test_a_source_is_tied_where_the_halves_of_the_samples_disagree(
    manifest: Manifest, second: float, rivals: tuple[str, ...]
) -> None:
    """Though the intervals are apart: layer 2 leads on even samples, and on odd ones only if `second` is small."""
    run = run_of(manifest, at(expert=[380], merged=[300]), 400, {2: (0.6, 0.55, 0.65), 3: (0.4, 0.35, 0.45)})
    shares = {2: (0.9, 1 - second), 3: (0.1, second)}
    rows = [
        {"task": "t0", "variant": "merged", "layer": layer, "sample_id": str(sample), "drift_l2": 1.0}
        | {"final_share": halves[sample % 2]}
        for layer, halves in shares.items()
        for sample in range(8)
    ]
    run._frames["samples"] = conform_to_schema(pd.DataFrame(rows), TABLES["samples"])
    found = verdict(run)
    assert found.source is not None and (found.source.layer, found.source.rivals) == (2, rivals)
    assert any("too close to call" in text for text in found.sentences) == bool(rivals)


def test_files_for_others_name_the_folder_and_not_where_it_lies(manifest: Manifest) -> None:
    run = run_of(manifest, at(expert=[380], merged=[300]), 400, {})
    moved = DriftRun(Path("/home/somebody/my runs/first one"), run.manifest)
    moved._frames |= run._frames
    found = verdict(moved)
    assert "calibrate '/home/somebody/my runs/first one' " in found.command
    assert hide_run_path(moved, found.sentences[-1]) == "Next: `driftlens calibrate 'first one' --auto`."


def test_a_named_calibration_is_judged_and_not_called_the_newest(manifest: Manifest) -> None:
    run = run_of(manifest, at(expert=[95, 95], merged=[60, 60], other=[70, 70], cal=[80, 80]), 100, {})
    found = verdict(run, "other")
    assert found.after == OTHER and said_of(found, OTHER).startswith("other:") and not said_of(found, CAL)
    assert said_of(verdict(run), CAL).startswith("cal (best of 2 calibrations on these samples):")


def test_without_scores_relative_drift_is_judged(tmp_path: Path) -> None:
    run = open_run(write_full_run(tmp_path / "run", has_labels=False, size=Size(blocks=1, samples=40)))
    found, final = verdict(run), run.layers(layer="final").groupby("variant")["drift_rel"].mean()
    assert found.measure.title == "relative drift" and "ccuracy" not in " ".join(found.sentences)
    for variant in ("base", "merged", "calibrated:featcal"):
        assert f"{display_name(variant)} {100 * final[variant]:.1f} %" in found.sentences[0]
    assert [(gap.variant, gap.against, gap.side) for gap in found.gaps] == [
        ("merged", "base", 1),
        ("calibrated:featcal", "merged", 1),
        ("calibrated:featcal", "base", 1),
    ]
    assert found.gaps[1].change.value == pytest.approx(final["calibrated:featcal"] - final["merged"])


@pytest.mark.slow
def test_scores_of_other_metrics_are_in_no_mean_with_shares(tmp_path: Path) -> None:
    run = write_scored_run(tmp_path / "run")
    found = verdict(run)
    assert found.tasks == ("match", "pick", "similar")
    rows = {row[0]: row for row in task_table(run, found).rows}
    assert rows["words"][1:4] == (None, None, None) and rows["pick"][3] is not None


def test_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    only_base = open_run(write_full_run(tmp_path / "run", variants=("base",), size=Size(blocks=1)))
    assert verdict(only_base).sentences == ("No measurements to base a verdict on.",)
    assert not task_table(only_base, verdict(only_base)).rows


def test_layers_have_the_names_of_their_blocks(manifest: Manifest) -> None:
    run = DriftRun(Path("nowhere"), manifest)
    assert [run.layer_name(layer) for layer in (1, 3)] == [
        "visual.conv1 (layer 1 of 4)",
        "block 1 (layer 3 of 4)",
    ]
    other: Any = [dataclasses.replace(info, path=f"stage.{info.index}") for info in manifest.layers]
    assert DriftRun(run.path, dataclasses.replace(manifest, layers=other)).layer_name(3) == "stage.3 (layer 3 of 4)"


PAGE = Path(__file__).with_name("questions.md").read_text(encoding="utf-8")
QUESTIONS = [line.split(" | ")[1:] for line in PAGE.splitlines() if line[2:3].isdigit()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DriftRun]:
    manifest = read_manifest(write_run(tmp_path_factory.mktemp("stranger") / "run"))
    return {name: stranger(manifest, name) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_shows_what_every_surface_says_first(name: str, runs: dict[str, DriftRun]) -> None:
    run = runs[name]
    found = verdict(run)
    first = [headline_sentence(headline(run)), *found.sentences]
    shown = "\n".join([*first, "", table_text(task_table(run, found))])
    assert f"```text\n{shown}\n```" in PAGE
    assert run_summary_text(run).split("\n\n")[1] == "\n".join(first)
    shared = tuple(hide_run_path(run, text) for text in found.sentences)
    assert report_verdict(run).sentences == shared


@pytest.mark.parametrize("name", RUNS)
def test_its_answers_are_those_of_the_tables(name: str, runs: dict[str, DriftRun]) -> None:
    assert len(QUESTIONS) == 10
    answers = [row[[*RUNS].index(name) + 2].removesuffix(" |") for row in QUESTIONS]
    right, tasks, found = RUNS[name], runs[name].tasks, verdict(runs[name])
    gaps = {(at.variant, at.against): at for at in found.gaps}

    def gap(variant: str, against: str) -> str:
        """Without its sign, in points, as the counts have it."""
        lost = sum(right[task, variant] - right[task, against] for task in tasks)
        return f"{abs(100 * lost / NUM / len(tasks)):.1f}"

    for answer, against in zip(answers[:2], ("expert", "base"), strict=True):
        said = {1: "yes", 0: "can't be told", -1: "no"}[gaps["merged", against].side]
        assert gap("merged", against) in answer and answer.startswith(said)
    change = gaps["merged", "base"].change
    half = 100 * max(change.value - change.low, change.high - change.value)
    assert answers[2].startswith(f"± {half:.1f}, {NUM * len(tasks)}") and answers[2].endswith("paired")
    agree = [max(len(at.better), len(at.worse)) for at in (gaps["merged", "expert"], gaps["merged", "base"])]
    assert f"{agree[name == 'good']} of {len(tasks)}" in answers[3]
    after = next((variant for _, variant in right if variant.startswith("calibrated:")), "")
    if after:
        assert gap(after, "merged") in answers[4] and f"still {gap(after, 'base')} below" in answers[4]
    else:
        assert "nothing" in answers[4]
    assert f"t0: {100 * right['t0', after or 'merged'] / NUM:.1f} %" in answers[5]
    assert found.source is not None and found.source.layer == max(BY_LAYER, key=lambda layer: BY_LAYER[layer])
    ends = f"{100 * found.source.share.low:.0f} to {100 * found.source.share.high:.0f} %"
    assert answers[6] == f"{found.source.name}, {ends}" and " (layer " in answers[6]
    assert answers[7] == f"{found.source.share.n} samples" == f"{8 * len(tasks)} samples"
    bad = [task for task in tasks if right[task, "expert"] < right[task, "base"]]
    assert list(found.bad_experts) == bad and answers[8].startswith(f"yes, {bad[0]}:" if bad else "no ")
    assert {"good": "report", "below": "merge", "expert": "validate"}[name] in answers[9]
    assert f"driftlens {answers[9].split()[-1]}" in found.command or name != "good"
