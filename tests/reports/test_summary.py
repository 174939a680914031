from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.cells import cell_len
from scipy import stats

from driftlens.results.checks import CheckResult
from driftlens.results.listing import RunSummary, find_runs
from driftlens.results.verdict import caveat_sentences, headline, headline_sentence, verdict
from driftlens.runs.manifest import read_manifest, write_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import VerifyResult
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import Cancelled
from driftlens.utils.intervals import wilson_interval
from driftlens_reports.build import Report
from driftlens_reports.facts import decision_sentence, self_check_sentence
from driftlens_reports.terminal import run_list_text, run_summary_text, verification_text
from tests.runs.full_run import write_run


def lines_of(text: str, title: str) -> list[str]:
    """The lines of the section called `title`."""
    section = next(part for part in text.split("\n\n") if part.startswith(title))
    return section.splitlines()[1:]


def test_the_numbers_are_those_of_the_tables(run: DriftRun) -> None:
    header, *rows = lines_of(run_summary_text(run, verbose=True), "Final feature")
    names = ["task", "model", "L2 drift", "relative drift", "of base distance", "cosine", "samples"]
    assert re.split(r"\s{2,}", header.strip()) == names
    assert len(rows) == 6 + 1 and "half a 95 % interval" in rows.pop()
    for row in rows:
        task, model, drift, relative, _, cosine, samples = re.split(r"\s{2,}", row.strip())
        final = run.layers(task, model if model in run.variants else f"calibrated:{model}", "final").iloc[0]
        mean, share, n = (float(final[column]) for column in ("drift_l2_mean", "drift_rel", "n"))
        half = stats.t.ppf(0.975, n - 1) * final["drift_l2_std"] / (n - 1) ** 0.5
        assert drift == f"{mean:#.3g} +- {half:#.2g}"
        assert relative == f"{100 * share:.1f} % +- {100 * half * share / mean:.1f} %"
        assert cosine.startswith(f"{final['cos_mean']:#.3g} +- ") and samples == "6"


def test_accuracies_stand_next_to_their_variants(run: DriftRun) -> None:
    header, *rows, _ = lines_of(run_summary_text(run, verbose=True), "Accuracy on")
    assert header.split()[:3] == ["task", "model", "metric"]
    scores = run.accuracy()
    for row, (value, low, high) in zip(rows, scores[["value", "ci_low", "ci_high"]].to_numpy(), strict=True):
        assert f"{100 * value:.1f} %  {100 * low:.1f} to {100 * high:.1f} %" in re.sub(r"\s{2,}", "  ", row)


def test_the_largest_shares_come_first(run: DriftRun) -> None:
    cars, _ = lines_of(run_summary_text(run, verbose=True), "Where the final drift comes from")
    assert cars.strip() == (
        "cars: largest shares of the final drift: block 1 (layer 3 of 4) 60.3 %, "
        "visual.conv1 (layer 1 of 4) 15.1 %, visual.ln_post (layer 4 of 4) 15.1 %; n = 6"
    )


def test_self_checks_show_their_largest_error(run: DriftRun) -> None:
    closure, jacobian, *_ = lines_of(run_summary_text(run, verbose=True), "Self-checks")
    assert "holds, error at most 4.0e-07 (task cars, base, visual.ln_post (layer 4 of 4))" in closure
    assert "holds, error at most " in jacobian


def test_a_claim_that_fails_is_said_to_fail() -> None:
    place = "task a, merged, layer 2"
    failing = CheckResult(
        "closure: drift equals", "closure", {}, "fail", 0.3, "<=", 1e-4, 1e-4 - 0.3, n=1, where=place
    )
    assert "DOES NOT HOLD (limit 1.0e-04), error at most 3.0e-01" in self_check_sentence(failing)
    unknown = dataclasses.replace(failing, status="skip", value=math.nan)
    assert self_check_sentence(unknown) == "closure (drift equals): not measured"


def test_a_synthetic_run_says_so_before_any_number(run: DriftRun, bare: DriftRun) -> None:
    assert run_summary_text(run).splitlines()[1].startswith("Synthetic demo")
    assert "no benchmark" in run_summary_text(run).splitlines()[1]
    assert "Synthetic" not in run_summary_text(bare)


def test_what_was_not_measured_is_said_and_not_invented(bare: DriftRun) -> None:
    text = run_summary_text(bare, verbose=True)
    assert [line.strip() for line in lines_of(text, "Accuracy on")] == ["not measured"]
    assert all(line.endswith("not measured") for line in lines_of(text, "Self-checks"))
    assert all("largest local mismatch" in line for line in lines_of(text, "Where the final drift"))
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)


def test_columns_are_aligned_as_a_terminal_shows_them(hostile: DriftRun) -> None:
    *lines, note = lines_of(run_summary_text(hostile, verbose=True), "Final feature")
    assert len(lines) == 1 + 3 * 2 and "95 % interval" in note
    assert len({cell_len(line) for line in lines}) == 1


def test_names_do_not_steer_the_terminal(hostile: DriftRun) -> None:
    text = run_summary_text(hostile, verbose=True)
    assert "\x1b" not in text
    assert "\ufffd[31mred\ufffdline" in text


def test_a_listing_names_the_worst_task_and_keeps_unreadable_runs(run: DriftRun) -> None:
    lines = run_list_text([*find_runs(run.path), RunSummary(path=Path("old"), name="old", problem="torn")])
    header, good, spoilt, problem = lines.splitlines()
    drift = {task: run.value("drift_l2_mean", task=task) for task in run.tasks}
    worst = max(drift, key=lambda task: drift[task])
    assert good.endswith(f"{drift[worst]:#.3g} ({worst})") and " done " in good
    assert "unreadable" in spoilt and spoilt.endswith("not measured")
    assert problem == "old: torn"
    assert header.index("state") == good.index("done") == spoilt.index("unreadable")


def test_a_verification_says_which_files_differ() -> None:
    assert verification_text(VerifyResult(3, (), (), ())) == "3 files checked: unchanged"
    text = verification_text(VerifyResult(3, ("a",), ("b", "c"), ("d\x1b",)))
    assert text.splitlines() == [
        *("3 files checked: not as they were written", "missing: a", "changed: b", "changed: c"),
        "not listed: d\ufffd",
    ]


def test_the_verdict_comes_first_and_the_rest_when_asked_for(run: DriftRun) -> None:
    short, long = run_summary_text(run), run_summary_text(run, verbose=True)
    start = "\n".join([headline_sentence(headline(run)), *verdict(run).sentences])
    assert [text.split("\n\n")[1] for text in (short, long)] == [start, start]
    header, *rows = lines_of(short, "Task by task")
    assert re.split(r"\s{2,}", header)[:5] == ["task", "base", "expert", "merged", "featcal"]
    assert [row.split()[0] for row in rows[: len(run.tasks)]] == list(run.tasks)
    assert "closure (" not in short and "closure (" in long


def test_decisions_add_up() -> None:
    frame = pd.DataFrame(
        {
            "flipped": [True, False, False, False],
            "certified": [False, True, False, False],
            "score_drift_l2": [1.0, 1.0, 1.0, 1.0],
            "score_bound": [2.0, 4.0, 4.0, 8.0],
        }
    )
    text = decision_sentence(frame, "merged")
    low, high = (100 * end for end in wilson_interval(1, 4))
    assert f"25.0 % ({low:.1f} to {high:.1f} %) of 4 decisions differ" in text
    assert f"25.0 % ({low:.1f} to {high:.1f} %) are certified by their margin, 50.0 % kept without" in text
    assert "25.0 % of its bound (median)" in text


DAMAGE = "status.json can't be read: expected an object, got []. Remove it; the results do not depend on it."
UNFINISHED = "This run is unfinished; missing parts may follow."


def test_of_a_finished_run_only_the_damage_is_told(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run"))
    (run.path / "status.json").write_text("[]")
    assert caveat_sentences(run) == [DAMAGE]
    (run.path / "status.json").unlink()
    assert caveat_sentences(run) == []


def test_an_unfinished_run_is_told_to_be_unfinished(tmp_path: Path) -> None:
    with (
        pytest.raises(Cancelled),
        RunWriter.create(tmp_path / "run", spec_yaml="", spec_digest="", name="run"),
    ):
        raise Cancelled("cancelled")
    run = open_run(tmp_path / "run")
    assert caveat_sentences(run) == ["This run is cancelled; missing parts may follow."]
    (run.path / "status.json").write_text("[]")
    assert caveat_sentences(run) == [DAMAGE, UNFINISHED]
    (run.path / "status.json").unlink()
    assert caveat_sentences(run) == [UNFINISHED]


def test_a_page_folds_all_warnings_but_the_first_few(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_manifest(folder, replace(read_manifest(folder), warnings=[f"trouble {at}" for at in range(5)]))
    page = Report(open_run(folder), sections=["verdict"]).files(["html"])["report.html"].decode()
    shown, folded = page.split('<details class="stamp"><summary>2 more</summary>')
    assert "trouble 2" in shown and "trouble 3" not in shown and "trouble 4" in folded
