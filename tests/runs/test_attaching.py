"""Results of other tools beside a run's own: what is taken over, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from driftlens.results.measures import findings_frame
from driftlens.runs.external_scores import attach_scores
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.errors import DataError
from driftlens.utils.intervals import wilson_interval
from driftlens_reports.terminal import run_summary_text
from tests.runs.full_run import Size, write_full_run

NEW = {
    "results": {
        "arc_easy": {"alias": "arc_easy", "acc,none": 0.75, "acc_stderr,none": 0.01, "acc_norm,none": 0.99},
        "gsm8k": {"exact_match,strict-match": 0.5, "exact_match_stderr,strict-match": "N/A"},
        "wikitext": {"word_perplexity,none": 12.5, "word_perplexity_stderr,none": 1.0, "sample_len": 3},
    },
    "n-samples": {"arc_easy": {"original": 2376, "effective": 2000}},
    "config": {"model": "hf", "model_args": "pretrained=merged"},
    "lm_eval_version": "0.4.5",
}
OLD = {"results": {"arc_easy": {"acc": 0.8, "acc_stderr": 0.2}}, "versions": {"arc_easy": 0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_full_run(tmp_path / "run", tasks=("cars",), size=Size(blocks=1, samples=8))


def written(folder: Path, content: Any) -> Path:
    file = folder.parent / "results.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_both_forms_of_the_file_become_rows_of_their_own(folder: Path) -> None:
    own = open_run(folder).accuracy()
    means = findings_frame(open_run(folder))
    file = written(folder, NEW)
    run = attach_scores(folder, "merged", file)
    assert len(run.accuracy()) == len(own) + 4
    rows = {(row["task"], row["metric"]): row for row in run.accuracy().to_dict("records")}
    row = rows[("arc_easy", "harness:acc")]
    assert (row["variant"], row["value"], row["n"]) == ("merged", 0.75, 2000)
    assert (row["ci_low"], row["ci_high"]) == pytest.approx((0.75 - 0.0196, 0.75 + 0.0196), abs=1e-5)
    strict = rows[("gsm8k", "harness:exact_match,strict-match")]
    assert strict["value"] == 0.5 and math.isnan(strict["ci_low"])
    assert rows[("wikitext", "harness:word_perplexity")]["ci_high"] > 14
    told = run.manifest.attached["merged results.json"]
    assert told["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest() and told["version"] == "0.4.5"
    assert verify_files(folder).ok and findings_frame(run).equals(means)  # nothing of it is averaged with own scores
    text = run_summary_text(run, verbose=True)
    assert text.index("Scores on test samples") < text.index("arc_easy")
    assert attach_scores(folder, "merged", written(folder, OLD)).accuracy("cars").shape == own.shape
    scores = open_run(folder).accuracy()
    assert [*scores.ci_high[(scores.task == "arc_easy") & (scores.metric == "harness:acc")]] == [1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "valid dictionary"),
        ({"results": {"a": 1}}, "valid dictionary"),
        ({"results": {"a": {"acc,none": "N/A"}}}, "no number"),
        ({"results": {"a": {"acc,none": -0.5}}}, "acc of a is -0.5"),
        ({"results": {"a": {"acc,none": float("nan")}}}, "no number"),
        ({"config": {"model": "merged"}}, "no number"),
    ],
)
def test_other_files_are_refused_and_nothing_is_written(folder: Path, content: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attach_scores(folder, "merged", written(folder, content))
    assert open_run(folder).manifest.attached == {}


def rows_of(run: DriftRun) -> dict[tuple[str, str], dict[str, Any]]:
    rows = run.accuracy()
    kept = rows[rows["metric"].str.startswith("harness:")].to_dict("records")
    return {(row["task"], row["metric"].removeprefix("harness:")): row for row in kept}


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        ({"results": {"a": {"acc,none": 0.5, "acc_stderr,none": math.nan}, "b": {"f1": math.inf}}}, "b f1"),
        ({"results": {"a": {"acc,none": 0.5, "alias": "a"}, "b": {"acc,none": "NaN"}}}, "b acc,none"),
    ],
)
def test_what_is_no_finite_number_is_left_out_and_named(
    folder: Path, content: Any, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = attach_scores(folder, "merged", written(folder, content))
    (about,) = run.manifest.attached.values()
    assert about["left_out"] == [lost] and f"no finite number: {lost}" in caplog.text
    assert [row["value"] for row in rows_of(run).values()] == [0.5]


def test_intervals_come_from_errors_or_counts_and_percent_is_a_share(folder: Path) -> None:
    scores = {
        "counted": {"acc,none": 0.25, "acc_stderr,none": "N/A"},
        "certain": {"acc,none": 0.0, "acc_stderr,none": 0.0},
        "unknown": {"acc,none": 0.0, "acc_stderr,none": 0.0},
        "percent": {"f1,none": 88.5, "f1_stderr,none": 1.0},
    }
    counts = {task: {"effective": 40} for task in ("counted", "certain", "percent")}
    rows = rows_of(attach_scores(folder, "merged", written(folder, {"results": scores, "n-samples": counts})))
    ends = {task: (row["ci_low"], row["ci_high"]) for (task, _), row in rows.items()}
    assert ends["counted"] == wilson_interval(10, 40) and ends["certain"] == wilson_interval(0, 40)
    assert all(map(math.isnan, ends["unknown"]))
    assert rows["percent", "f1"]["value"] == pytest.approx(0.885)
    assert ends["percent"] == pytest.approx((0.885 - 0.0196, 0.885 + 0.0196), abs=1e-5)


def test_an_unknown_variant_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(DataError, match="calibrated:featcal"):
        attach_scores(folder, "calibrated:other", written(folder, OLD))
    assert len(attach_scores(folder, "expert:cars", written(folder, OLD)).accuracy())
