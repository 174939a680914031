"""Results of other tools beside a run's own: what is taken over, and what is refused."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from driftlens.results.measures import findings_frame
from driftlens.runs.external_scores import attach_scores
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.verify import verify_files
from driftlens.utils.errors import DataError
from driftlens.utils.intervals import wilson_interval
from driftlens.utils.variants import metric_by_name
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
        ({"humaneval": 0.5, "config": {"model": "merged"}}, "valid dictionary"),
        ({"humaneval": {"pass@1": float("nan")}, "config": {}}, "no number"),
        ({"model": {"width": 64}, "data": {"n": 3}}, "'width' is no metric"),
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


def test_code_by_bigcode_has_no_intervals_as_the_file_tells_no_number(
    folder: Path,
) -> None:
    content = {
        "humanevalplus": {"pass@1": 0.25, "pass@10": 0.5},
        "mbppplus": {"pass@1": 0.75, "pass@10": 0.875},
        "config": {"model": "merged", "n_samples": 10, "limit": None, "use_auth_token": "secret"},
    }
    run = attach_scores(folder, "merged", written(folder, content))
    rows = rows_of(run)
    assert {key: row["value"] for key, row in rows.items()} == {
        (task, metric): value for task, of in content.items() if task != "config" for metric, value in of.items()
    }
    assert all(math.isnan(row["ci_low"]) and pd.isna(row["n"]) for row in rows.values())
    assert {metric_by_name(row["metric"]).full_description for row in rows.values()} == {
        "Measured by another tool. 0 to 1, higher is better."
    }
    (about,) = run.manifest.attached.values()
    assert about["tool"] == "bigcode-evaluation-harness" and "secret" not in str(about)


@pytest.mark.parametrize(
    ("content", "lost"),
    [
        (
            {"humaneval": {"pass@1": 0.5, "pass@10": math.nan}, "config": {"top_p": math.inf}},
            "humaneval pass@10",
        ),
        (
            {"harmbench": {"micro ASR (lower)": 0.5, "by_part": {"cyber": math.nan}}},
            "harmbench by_part cyber",
        ),
        ({"results": {"a": {"acc,none": 0.5, "acc_stderr,none": math.nan}, "b": {"f1": math.inf}}}, "b f1"),
        ({"results": {"a": {"acc,none": 0.5, "alias": "a"}, "b": {"acc,none": "NaN"}}}, "b acc,none"),
        ({"humaneval": {"pass@1": 0.5, "pass@10": None}, "config": {"limit": None}}, "humaneval pass@10"),
    ],
)
def test_what_is_no_finite_number_is_left_out_and_named(
    folder: Path, content: Any, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = attach_scores(folder, "merged", written(folder, content))
    (about,) = run.manifest.attached.values()
    assert about["left_out"] == [lost] and f"no finite number: {lost}" in caplog.text
    assert [row["value"] for row in rows_of(run).values()] == [0.5]


HIGHER, LOWER, EITHER = "higher is better", "lower is better", "direction unknown"


@pytest.mark.parametrize(
    ("task", "scores", "metric", "way"),
    [
        ("wildguardtest", {"micro harm (lower)": 0.4}, "micro harm (lower)", LOWER),
        (
            "wildguardtest",
            {"prompt_type harm (lower)": {"others": 0.4}},
            "prompt_type harm (lower),others",
            LOWER,
        ),
        ("harmbench", {"micro ASR (lower)": 0.4}, "micro ASR (lower)", LOWER),
        ("harmbench", {"inverted_micro_asr_lower": 0.4}, "inverted_micro_asr_lower", HIGHER),
        ("do_anything_now", {"macro ASR": 0.4}, "macro ASR", LOWER),
        ("wildjailbreak:benign", {"macro ASR": 0.4}, "macro ASR,benign", HIGHER),
        ("xstest", {"inverted_rta_all_safe": 0.4}, "inverted_rta_all_safe", HIGHER),
        ("xstest", {"inverted_rta_contrast_homonyms": 0.4}, "inverted_rta_contrast_homonyms", LOWER),
        ("xstest", {"rta_all_contrast": 0.4}, "rta_all_contrast", HIGHER),
        ("xstest", {"rta_all_safe": 0.4}, "rta_all_safe", LOWER),
        ("xstest", {"rta_harmfulness_all_contrast": 0.4}, "rta_harmfulness_all_contrast", LOWER),
        ("xstest", {"refusal_prf": {"f1": 0.4}}, "refusal_prf,f1", HIGHER),
        ("or_bench:toxic", {"accuracy": 0.5, "refusal_rate_mean": 0.4}, "refusal_rate_mean", EITHER),
    ],
)
def test_of_safety_the_direction_is_said_and_nothing_that_is_worse_higher_is_averaged(
    folder: Path, task: str, scores: dict[str, Any], metric: str, way: str
) -> None:
    run = attach_scores(folder, "merged", written(folder, {task: scores, f"{task} again": scores}))
    row = rows_of(run)[task, metric]
    assert row["value"] == 0.4 and math.isnan(row["ci_low"])
    assert way in metric_by_name(row["metric"]).full_description.lower()
    assert metric_by_name(row["metric"]).is_averaged == (way == HIGHER)
    assert next(iter(run.manifest.attached.values()))["tool"] == "safety-eval"


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
