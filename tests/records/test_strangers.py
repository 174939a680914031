"""A stranger reads three runs: the page of ten questions shows what they print, and its answers are the tables'."""

from __future__ import annotations

import pathlib

import pytest

from driftlens.findings.verdict import shareable, task_sheet, verdict
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun
from driftlens_reports.sections import verdict_of
from driftlens_reports.terminal import sheet_text, summary
from tests.records.full_run import write_run
from tests.records.strangers import NUM, RUNS, SHARES, stranger

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")
QUESTIONS = [line.split(" | ")[1:] for line in PAGE.splitlines() if line[2:3].isdigit()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DriftRun]:
    manifest = read_manifest(write_run(tmp_path_factory.mktemp("stranger") / "run"))
    return {name: stranger(manifest, name) for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_shows_what_every_surface_says_first(name: str, runs: dict[str, DriftRun]) -> None:
    run = runs[name]
    found = verdict(run)
    shown = "\n".join([*found.sentences, "", sheet_text(task_sheet(run, found))])
    assert f"```text\n{shown}\n```" in PAGE
    assert summary(run).split("\n\n")[1] == "\n".join(found.sentences)
    shared = tuple(shareable(run, text) for text in found.sentences)
    assert verdict_of(run).sentences == shared


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
    assert found.source is not None and found.source.layer == max(SHARES, key=lambda layer: SHARES[layer])
    ends = f"{100 * found.source.share.low:.0f} to {100 * found.source.share.high:.0f} %"
    assert answers[6] == f"{found.source.name}, {ends}" and " (layer " in answers[6]
    assert answers[7] == f"{found.source.share.n} samples" == f"{8 * len(tasks)} samples"
    bad = [task for task in tasks if right[task, "expert"] < right[task, "base"]]
    assert list(found.bad_experts) == bad and answers[8].startswith(f"yes, {bad[0]}:" if bad else "no ")
    assert {"good": "report", "below": "calibrate", "expert": "validate"}[name] in answers[9]
    assert f"driftlens {answers[9].split()[-1]}" in found.command or name != "good"
