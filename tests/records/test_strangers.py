"""A stranger reads three runs: the page of ten questions shows what they print, and its answers are the tables'."""

from __future__ import annotations

import pathlib

import pytest

from driftlens.pipeline.study import card
from driftlens.records.manifest import read_manifest
from driftlens.records.run import DriftRun
from driftlens.records.verdict import shareable, task_sheet, verdict
from driftlens_reports.sections.verdict import verdict_of
from driftlens_reports.terminal import sheet_text, summary
from tests.records.factory import write_run
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
    assert [
        line[2:]
        for line in card._verdict(run, "cal" if name == "below" else "").split("\n\n")[0].splitlines()
    ] == [card.escaped(text) for text in shared]


@pytest.mark.parametrize("name", RUNS)
def test_its_answers_are_those_of_the_tables(name: str, runs: dict[str, DriftRun]) -> None:
    assert len(QUESTIONS) == 10
    column = [*RUNS].index(name) + 2
    answers = [row[column].removesuffix(" |") for row in QUESTIONS]
    right, tasks = RUNS[name], runs[name].tasks

    def gap(variant: str, against: str) -> float:
        return 100 * sum(right[task, variant] - right[task, against] for task in tasks) / NUM / len(tasks)

    for answer, against in zip(answers, ("expert", "base"), strict=False):
        worse, other = (
            gap("merged", against) < 0,
            "worse" if against == "expert" or name == "below" else "yes",
        )
        assert f"{abs(gap('merged', against)):.1f}" in answer and (other in answer or "told apart" in answer)
        assert worse or answer.startswith("yes")
    gaps = {(at.variant, at.against): at for at in verdict(runs[name]).gaps}
    to_base = gaps["merged", "base"]
    half = min(to_base.change.value - to_base.change.low, to_base.change.high - to_base.change.value)
    assert answers[2] == f"± {100 * half:.1f}, {NUM * len(tasks)} test samples, paired" or answers[
        2
    ].startswith("± ")
    agree = max(len(to_base.better), len(to_base.worse))
    assert f"{agree} of {len(tasks)}" in answers[3]
    after = next((variant for _, variant in right if variant.startswith("calibrated:")), "")
    assert (
        (f"{gap(after, 'merged'):.1f}" in answers[4] and f"{-gap(after, 'base'):.1f}" in answers[4])
        if after
        else True
    )
    assert f"{100 * right['t0', after or 'merged'] / NUM:.1f} %" in answers[5]
    share, n = max(SHARES.values()), 8 * len(tasks)
    assert verdict(runs[name]).source is not None and answers[7] == f"{n} samples"
    assert f"{100 * share[0]:.0f}" not in answers[6], "the interval, not the value alone"
    assert ("t1" in answers[8]) == (verdict(runs[name]).bad_experts == ("t1",))
    assert {"good": "report", "below": "calibrate", "expert": "validate"}[name] in answers[9]
