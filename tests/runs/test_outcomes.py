"""What became of samples: one word from what three models answer, wherever it is told."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest

from driftlens.results.measures import OUTCOMES, sample_outcomes
from driftlens.runs.run import DriftRun, open_run
from tests.runs.full_run import write_run

REPAIRED = "calibrated:featcal"
WORDS = {
    (True, True, True): "right",
    (True, True, False): "broken",
    (True, False, True): "repaired",
    (True, False, False): "still wrong",
}
"""By whether expert, merged and repaired model are right."""


@pytest.mark.parametrize("of", ["diagnosis", "test"])
def test_every_combination_of_answers_has_its_word_from_either_split(tmp_path: Path, of: str) -> None:
    """The reference is a table of all eight combinations, and of the four without a repair."""
    path = write_run(tmp_path / "run", tasks=("cars",), variants=("base", "merged", REPAIRED))
    run = open_run(path)
    cases = [*itertools.product((True, False), repeat=3)]
    ids = [f"s{at}" for at in range(len(cases))]
    answers = {name: [case[at] for case in cases] for at, name in enumerate(("expert", "merged", REPAIRED))}
    if of == "diagnosis":
        row = run.outputs().iloc[0]
        rows = [
            row.to_dict()
            | {"variant": name, "sample_id": ids[at], "label": "one", "pred": "one" if is_right else "two"}
            | {"expert_pred": "one" if cases[at][0] else "two"}
            for name in ("merged", REPAIRED)
            for at, is_right in enumerate(answers[name])
        ]
        unlabelled = [rows[0] | {"sample_id": "unlabelled", "label": None}]
        run._frames["outputs"] = pd.DataFrame(rows + unlabelled).astype(run.outputs().dtypes)
    else:
        run._frames["outputs"] = run.outputs().head(0)
        singles = [
            {
                "task": "cars",
                "variant": name,
                "metric": "accuracy",
                "sample_id": ids[at],
                "value": float(is_right),
            }
            for name in answers
            for at, is_right in enumerate(answers[name])
        ]
        run._frames["scores"] = pd.DataFrame(singles).reindex(columns=run.scores().columns)
    found = sample_outcomes(run, "cars", "merged", REPAIRED)
    assert found["outcome"].to_dict() == {
        name: WORDS.get(case, "expert wrong") for name, case in zip(ids, cases, strict=True)
    }
    assert {*found["outcome"]} <= {*OUTCOMES}
    without = sample_outcomes(run, "cars")["outcome"]
    assert "never gained" not in {*found["outcome"]}  # the base has no answers yet
    table = "outputs" if of == "diagnosis" else "scores"
    rows = run._frames[table]
    base = rows[rows["variant"] == "merged"].assign(variant="base")
    told = DriftRun(run.path, run.manifest)
    told._frames |= run._frames | {table: pd.concat([rows, base], ignore_index=True)}
    after = sample_outcomes(told, "cars", "merged", REPAIRED)["outcome"]
    missed = [name for name, case in zip(ids, cases, strict=True) if case == (True, False, False)]
    assert (after != found["outcome"]).sum() == len(missed) == 1 and after[missed[0]] == "never gained"
    for name, (expert, merged, _) in zip(ids, cases, strict=True):
        assert without[name] == ("expert wrong" if not expert else "right" if merged else "wrong")


def test_without_labels_nothing_is_called_right_or_wrong(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", has_labels=False))
    assert sample_outcomes(run, "cars").empty
