"""Checks as a user writes them: what they mean, and what is refused, with path, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driftlens.results.checks import load_checks
from driftlens.utils.errors import SpecError
from tests.refusing import refusing

EXAMPLE = """
checks:
  - {metric: cos_mean, where: {variant: "calibrated:featcal", layer: final}, per: task, gte: 0.80}
  - {metric: drift_l2_mean, where: {layer: final}, change: {from: merged, to: "calibrated:featcal"}, lte: -0.20,
     severity: warn}
  - {metric: closure_error, agg: max, lte: 1e-4, name: closure}
"""


def test_the_example_means_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "checks.yaml"
    file.write_text(EXAMPLE)
    first, second, third = load_checks(file)
    assert (first.metric, first.metric_table, first.bounds, first.per) == (
        "cos_mean",
        "layers",
        {">=": 0.8},
        ("task",),
    )
    assert first.where == {"variant": "calibrated:featcal", "layer": "final"} and first.severity == "error"
    assert first.title == "cos_mean >= 0.8 where variant is calibrated:featcal, layer is final"
    assert [*second.change.values()] == [("merged", "calibrated:featcal")] and second.severity == "warn"
    assert second.title == "drift_l2_mean change from merged to calibrated:featcal <= -0.2 where layer is final"
    assert (third.title, third.agg, third.bounds) == ("closure", "max", {"<=": 1e-4})


def test_a_score_is_checked_by_its_own_name_and_a_change_in_points_or_relative() -> None:
    ends = ["merged", "calibrated:featcal"]
    entries = [
        {"metric": "accuracy", "change": {kind: ends}, "where": {"task": "dtd"}, "gte": -0.01}
        for kind in ("points", "relative")
    ]
    points, relative = load_checks({"checks": entries})
    for check in (points, relative):
        assert (check.metric_table, check.metric, *check.change.values()) == (
            "accuracy",
            "value",
            tuple(ends),
        )
        assert check.where == {"task": "dtd", "metric": "accuracy"}
    assert (points.is_relative, relative.is_relative) == (False, True)
    assert points.title.startswith("accuracy difference from merged") and "change" in relative.title


@pytest.mark.parametrize(
    ("metric", "table"),
    [
        ("kl", "outputs"),
        ("value", "accuracy"),
        ("sign_agreement", "params"),
        ("weight_change", "calibration"),
    ],
)
def test_a_column_finds_its_table(metric: str, table: str) -> None:
    (check,) = load_checks({"checks": [{"metric": metric, "gte": 0}]})
    assert check.metric_table == table


@pytest.mark.parametrize(
    ("entry", "message", "hint"),
    [
        (
            {"metric": "cos_maen", "gte": 0},
            "checks[0]: metric: no table has a number called 'cos_maen'",
            "'cos_mean'",
        ),
        ({"metric": "path", "gte": 0}, "no table has a number called 'path'", ""),
        ({"metric": "kl", "table": "layers", "gte": 0}, "the table 'layers' has no number called 'kl'", ""),
        ({"metric": "n", "gte": 0}, "'n' is a column of layers, accuracy", "`table: layers`"),
        ({"metric": "cos_mean"}, "checks[0]: no bound", "gte, lte, gt, lt"),
        ({"metric": "cos_mean", "severty": 0}, "checks[0].severty: unknown key", "'severity'"),
        ({"metric": "cos_mean", "gte": 0, "where": {"vriant": "merged"}}, "where: no 'vriant'", "'variant'"),
        (
            {"metric": "cos_mean", "gte": 0, "where": {"layer": True}},
            "checks[0].where.layer: Input should be a valid integer, got True",
            "",
        ),
        ({"metric": "cos_mean", "gte": 0, "per": "tsk"}, "per: no 'tsk' in the table 'layers'", "'task'"),
        ({"metric": "cos_mean", "gte": 0, "per": ["task", "path"]}, "per: no 'path'", ""),
        (
            {"metric": "cos_mean", "gte": 0, "change": {"from": "merged"}},
            "checks[0].change: expected two",
            "points:",
        ),
        (
            {"metric": "cos_mean", "gte": 0, "change": {"frm": "a", "to": "b"}},
            "checks[0].change: expected two",
            "points:",
        ),
        (
            {"metric": "cos_mean", "gte": 0, "change": {"from": "a", "to": "b"}, "per": "variant"},
            "change compares two variants, so 'variant' can't choose one",
            "Leave it out",
        ),
        ({"metric": "accuracy", "gte": 0, "change": {"points": ["a"]}}, "points: expected two", "{points:"),
    ],
)
def test_what_makes_no_sense_is_refused(entry: dict[str, Any], message: str, hint: str) -> None:
    with refusing(SpecError, message, hint=hint, code=2):
        load_checks({"checks": [{"metric": "closure_error", "lte": 1}, entry][::-1]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping, found NoneType"),
        ("checks: [", "line 1"),
        ("check:\n- {metric: cos_mean}", "check: unknown key"),
        ("checks:\n- !!python/object/apply:os.system [ls]", "line 2"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "checks.yaml"
    file.write_text(text)
    with refusing(SpecError, message, "checks.yaml"):
        load_checks(file)
