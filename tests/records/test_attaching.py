"""Results of the lm-evaluation-harness beside a run's own: what is taken over, and what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from driftlens.base.errors import DataError
from driftlens.findings.measures import findings
from driftlens.runs.attaching import attach
from driftlens.runs.manifest import read_manifest, write_manifest
from driftlens.runs.run import open_run
from driftlens.runs.verify import verify
from driftlens_reports.paper.exhibit import ExhibitOptions, exhibits
from driftlens_reports.paper.published import family
from driftlens_reports.terminal import summary
from tests.records.full_run import Size, write_full_run

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
    means = findings(open_run(folder), ["merged"])
    file = written(folder, NEW)
    run = attach(folder, "merged", file)
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
    assert (
        verify(folder).ok and findings(run, ["merged"]) == means
    )  # nothing of it is averaged with own scores
    text = summary(run, verbose=True)
    assert text.index("Accuracy on test samples") < text.index("Scores attached") < text.index("arc_easy")
    assert attach(folder, "merged", written(folder, OLD)).accuracy("cars").shape == own.shape
    scores = open_run(folder).accuracy()
    assert [*scores.ci_high[(scores.task == "arc_easy") & (scores.metric == "harness:acc")]] == [1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "results"),
        ({"results": {"a": 1}}, "results"),
        ({"results": {"a": {"acc,none": "N/A"}}}, "no number"),
    ],
)
def test_other_files_are_refused_and_nothing_is_written(folder: Path, content: Any, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        attach(folder, "merged", written(folder, content))
    assert "lm_eval" in caught.value.hint and open_run(folder).manifest.attached == {}


def test_an_unknown_variant_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(DataError, match="calibrated:featcal"):
        attach(folder, "calibrated:other", written(folder, OLD))
    assert len(attach(folder, "expert:cars", written(folder, OLD)).accuracy())


@pytest.mark.parametrize("loader", ["hf-decoder", "hf-encoder"])
def test_attached_scores_fill_the_exhibits_of_language_models(folder: Path, loader: str) -> None:
    manifest = read_manifest(folder)
    architecture = {**manifest.architecture, "loader": loader, "reads": "text"}
    write_manifest(folder, dataclasses.replace(manifest, architecture=architecture))
    run = open_run(folder)
    assert family(run) == ("language" if loader == "hf-decoder" else "text")
    single = exhibits["experts-llm"].draw([run], ExhibitOptions(paper=False)).data
    if loader == "hf-encoder":
        assert single.empty
        return
    assert set(single["row"]) == {"Base", "cars expert", "Best single"}  # of its own task alone
    for variant, share in (("base", 0.4), ("expert:cars", 0.6), ("merged", 0.5)):
        results = {"results": {"gsm8k": {"acc": share}, "mbpp": {"pass@1": 1 - share}}}
        run = attach(folder, variant, written(folder, results))
    single, both = (
        exhibits[name].draw([run], ExhibitOptions(paper=False)).data
        for name in ("experts-llm", "accuracy-llm")
    )
    best = single[single["row"] == "Best single"].set_index("column")["value"]
    assert best[["gsm8k", "mbpp"]].tolist() == pytest.approx([60, 60])
    assert single[single["row"] == "cars expert"].set_index("column")["value"]["mbpp"] == pytest.approx(40)
    shown = both[both["column"] == "gsm8k"].set_index("row")["value"]
    assert {"Base", "Best single"} < set(shown.index) and "cars expert" not in shown.index
    assert 50 in shown.to_numpy().round(9)
