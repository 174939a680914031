"""What `compare`, `check`, `summary` and `advise` say of tables of every kind: their numbers, and no more."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings, strategies as st

import driftlens as dl
from driftlens.results.compare import compare
from driftlens.results.verdict import summary_table
from driftlens.runs.manifest import Manifest, read_manifest
from driftlens.runs.schema import TABLES
from driftlens.runs.tables import conform_to_schema
from driftlens.utils.intervals import wilson_interval
from driftlens.utils.variants import display_name
from driftlens_reports.facts import layer_advice, layer_advice_text
from driftlens_reports.terminal import checks_text, run_comparison_text
from tests.runs.drawn_runs import CAL, SHARES, Right, interval, run_of, tables
from tests.runs.full_run import write_run

FEW = 8


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return read_manifest(write_run(tmp_path_factory.mktemp("sentences") / "run"))


def is_told(text: str, *values: float) -> bool:
    """Whether a text reads these values, in percent, one after the other."""
    found = [float(at) for at in re.findall(r"[+-]?\d+\.\d", text)]
    ends = range(len(found) - len(values) + 1)
    return any(
        all(
            abs(at - 100 * value) < 0.0501
            for at, value in zip(found[first : first + len(values)], values, strict=True)
        )
        for first in ends
    )


@settings(max_examples=FEW)
@given(made=tables(), stored=st.booleans())
def test_a_comparison_reads_its_tables_and_its_p_agrees_with_its_interval(
    manifest: Manifest, made: tuple[Right, int], stored: bool
) -> None:
    right, n = made
    run = run_of(manifest, right, n, {}, stored=stored)
    pair = ("base", "merged") if "base" in run.variants else ("merged", "merged")
    text = run_comparison_text(compare(run, before=pair[0], after=pair[1]))
    lines = text.splitlines()
    assert f"{display_name(pair[0])} -> {display_name(pair[1])}" in lines and "nan" not in text
    for task in run.tasks:
        (line,) = [line for line in lines if line.startswith(f"{task} ")]
        before, after = (right[task, model] / n for model in pair)
        low, high = interval(right, n, pair[::-1], [task], stored=stored)
        assert is_told(line, after - before, low, high) and line.rstrip().endswith(f" {n}")
        assert is_told(line, before) and is_told(line, after)
        counted = [line for line in lines if line.startswith(f"{task}: of ")]
        assert len(counted) == stored
        for said in counted:
            gained, lost = map(int, re.findall(r"(\d+) gained and (\d+) lost", said)[0])
            p = said.rpartition(" p ")[2]
            assert gained - lost == right[task, pair[1]] - right[task, pair[0]] and is_told(said, low, high)
            assert not (low > 0 or high < 0) or p.startswith("<") or float(p) <= 0.05
            assert (low <= 0 <= high) or float(p.removeprefix("< ")) < 0.0501
    means = [line for line in lines if line.startswith("mean change")]
    assert len(means) == (len(run.tasks) > 1)
    low, high = interval(right, n, pair[::-1], run.tasks, stored=stored)
    assume(min(abs(low), abs(high)) > 1e-9)
    for said in means:
        p = float(said.rpartition(" p ")[2].removeprefix("< "))
        assert is_told(said, low, high) and (p < 0.0501 if low > 0 or high < 0 else p > 0.0499)
    assert ("are not paired" in text) == (not stored)


@settings(max_examples=FEW)
@given(made=tables(), stored=st.booleans(), bound=st.integers(-40, 40))
def test_a_check_says_what_broke_on_how_many_samples_and_never_passes_unmeasured(
    manifest: Manifest, made: tuple[Right, int], stored: bool, bound: int
) -> None:
    right, n = made
    run = run_of(manifest, right, n, {}, stored=stored)
    wanted = bound / 100 + 0.00123  # no quotient of counts
    asked = [
        {"metric": "accuracy", "change": {"points": ["merged", CAL]}, "per": "task", "gte": wanted},
        {"metric": "accuracy", "where": {"variant": "merged"}, "gte": 0.50123},
        {"metric": "drift_rel", "lte": 1.0},
    ]
    report = dl.check(run, {"checks": asked})
    text, results = checks_text(report), report.results
    changes = [at for at in results if at.group]
    for at in changes:
        task = at.group["task"]
        change = (right[task, CAL] - right[task, "merged"]) / n
        ends = interval(right, n, (CAL, "merged"), [task], stored=stored)
        assert (at.value, at.ci_low, at.ci_high) == pytest.approx((change, *ends)) and at.samples == n
        assert (at.status == "pass") == (change >= wanted) and (at.margin >= 0) == (at.status == "pass")
    assert len(changes) == (len(run.tasks) if CAL in run.variants else 0)
    worst = min(run.tasks, key=lambda task: right[task, "merged"])
    level = results[-2]
    low, high = wilson_interval(right[worst, "merged"], n)
    assert level.value == right[worst, "merged"] / n and (level.ci_low, level.ci_high) == (low, high)
    assert (level.status == "pass") == (level.value >= 0.50123) and results[-1].status == "skip"
    for at in results:
        said = [line for line in text.splitlines() if line.startswith(f"{at.status}: {at.title}: ")]
        assert len(said) == (at.status != "pass")
        if at.status == "fail":
            assert f"(n = {n})" in said[0] and f"wanted >= {at.threshold:.10g}" in said[0]
    failed = sum(at.status == "fail" for at in results)
    assert f"{failed} failed" in text.splitlines()[-1]


@settings(max_examples=FEW)
@given(made=tables())
def test_a_summary_is_the_tables_and_claims_nothing(manifest: Manifest, made: tuple[Right, int]) -> None:
    right, n = made
    run = run_of(manifest, right, n, {})
    sheet = summary_table(run)
    rows = sheet.frame().set_index("task")
    named = {
        "expert": "expert",
        **{name: display_name(name) for name in run.variants if name != "baseline:cal-anchor"},
    }
    for task in run.tasks:
        for model, head in named.items():
            ends = [rows.loc[task, f"{head}{end}"] for end in ("", " low", " high")]
            assert ends == pytest.approx([right[task, model] / n, *wilson_interval(right[task, model], n)])
    mean = f"mean of {len(run.tasks)}"
    assert (mean in rows.index) == (len(run.tasks) > 1) and "nan" not in repr(sheet)
    for model, head in named.items() if mean in rows.index else ():
        values = [right[task, model] / n for task in run.tasks]
        halves = [[abs(value - end) for end in wilson_interval(round(value * n), n)] for value in values]
        down, up = (math.sqrt(sum(half[end] ** 2 for half in halves)) / len(values) for end in (0, 1))
        own = sum(values) / len(values)
        assert [rows.loc[mean, f"{head}{end}"] for end in ("", " low", " high")] == pytest.approx(
            [own, own - down, own + up]
        )
        assert rows.loc[mean, "test samples"] == n * len(values)
    assert not re.search(r"better|worse|clear|signific", repr(sheet))


CONFLICTS = st.lists(st.tuples(st.floats(-0.9, 0.9), st.floats(0.2, 3), st.floats(0, 1)), min_size=2, max_size=2)


@settings(max_examples=FEW)
@given(
    made=tables(),
    drawn=SHARES,
    has_ends=st.booleans(),
    cosines=st.dictionaries(st.integers(2, 3), CONFLICTS, max_size=2),
)
def test_advice_calls_a_layer_the_largest_only_where_all_intervals_lie_below(
    manifest: Manifest,
    made: tuple[Right, int],
    drawn: Mapping[int, Sequence[float]],
    has_ends: bool,
    cosines: Mapping[int, Sequence[Sequence[float]]],
) -> None:
    ends = {at: (share, share - low, share + high) for at, (share, low, high) in drawn.items()}
    shares = {at: found if has_ends else (found[0], math.nan, math.nan) for at, found in ends.items()}
    run = run_of(manifest, *made, shares)
    names = ("cos", "norm_ratio", "sign_agreement")
    own = [
        {"variant": "merged", "task": task, "scope": "layer", "path": f"layer.{layer}"}
        | dict(zip(names, values[at % 2], strict=True))
        for layer, values in cosines.items()
        for at, task in enumerate(run.tasks)
    ]
    run._frames["params"] = conform_to_schema(pd.DataFrame(own), TABLES["params"]) if own else run._frames["params"]
    text, num_tasks = layer_advice_text(layer_advice(run)), len(run.tasks)
    assert "nan" not in text and text
    if not shares:
        assert "was not measured" in text and "largest share" not in text
    elif not has_ends:
        assert "Without intervals, another" in text and "are lower" not in text and "as much:" not in text
    else:
        top = max(ends, key=lambda layer: ends[layer][0])
        reach = {
            at: [found[0] + way * abs(found[end] - found[0]) / math.sqrt(num_tasks) for end, way in ((1, -1), (2, 1))]
            for at, found in ends.items()
        }
        others = [at for at in ends if at != top]
        assume(all(abs(reach[at][1] - reach[top][0]) > 1e-9 for at in others))
        assume(all(ends[at][0] != ends[top][0] for at in others))
        is_clear = all(reach[at][1] < reach[top][0] for at in others)
        assert ("All other intervals are lower." in text) == is_clear != ("may contribute as much" in text)
        assert f"{run.layer_name(top)} has the largest share" in text
    measured = {at: np.array([values[task % 2] for task in range(num_tasks)]) for at, values in cosines.items()}
    lengths = {at: 1 / found[:, 1] for at, found in measured.items()}
    below = [
        at
        for at, found in measured.items()
        if found[:, 0].mean() < lengths[at].mean() / math.sqrt((lengths[at] ** 2).sum())
    ]
    if not cosines:
        assert "Task vectors were not compared" in text
    elif num_tasks == 1:
        assert "With one expert no task vectors conflict." in text
    else:
        layers = "1 layer;" if len(cosines) == 1 else f"{len(cosines)} layers;"
        assert f"conflict in {len(below) or 'none'} of {layers}" in text
        assert text.count("task vectors conflict (mean cosine") == len(below) and "without intervals" in text
