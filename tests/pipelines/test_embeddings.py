"""Embedding models from spec to verdict: pairs with numbers, queries with passages, sentences without labels."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy.stats import spearmanr

import driftlens as dl
from driftlens.results.verdict import verdict
from tests.zoo.related import SENTENCES, by_hand, rows_of, table
from tests.zoo.sentences import embedder, sentences, tokenizer_of
from tests.zoo.suite import spec_of_folders

pytestmark = pytest.mark.slow

PROMPTS = {"query": "question ", "document": "answer "}
KINDS = {".jsonl": "jsonl", ".csv": "table", ".parquet": "table"}


def entries(folder: Path, ending: str = ".jsonl") -> dict[str, Any]:
    """A task of pairs, one of queries in a corpus, one of queries with passages of their own; sentences calibrate."""
    calibration = table(folder / f"sentences{ending}", [{"text": text} for text in SENTENCES[:20]])
    pairs = zip(SENTENCES[20:40], SENTENCES[40:60], strict=True)
    rows = [{"text": one, "other": two, "score": (at * 7) % 20 / 4} for at, (one, two) in enumerate(pairs)]
    by_key = [{"passage": text, "topic": f"t{at % 4}"} for at, text in enumerate(SENTENCES[:40])]
    queries = [{"text": text, "topic": f"t{at % 4}"} for at, text in enumerate(SENTENCES[40:52])]
    plain = {"kind": KINDS[ending], "calibration": calibration, "input": "text"}
    found = {
        "sts": plain | {"test": table(folder / f"pairs{ending}", rows), "pair": "other", "target": "score"},
        "topics": plain
        | {"test": table(folder / f"queries{ending}", queries), "positive": "topic"}
        | {
            "corpus": {
                "file": table(folder / f"corpus{ending}", by_key),
                "text": "passage",
                "key": "topic",
            }
        },
    }
    if ending != ".csv":  # which has no lists
        own = [
            {"text": text, "good": [SENTENCES[at], SENTENCES[at + 1]], "bad": SENTENCES[30:36]}
            for at, text in enumerate(SENTENCES[52:])
        ]
        rerank = {"test": table(folder / f"rerank{ending}", own), "positive": "good", "negative": "bad"}
        found["rerank"] = plain | rerank
    return found


def spec_of(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Two experts of a base that has prompts; their average is repaired."""
    settings = {"prompts": PROMPTS, "similarity_fn_name": "cosine"}
    names = ["base", *data]
    for seed, name in enumerate(names):
        if not (folder / name).exists():
            sentences(folder / name, seed, pooling={"pooling_mode": "mean"}, settings=settings)
    return spec_of_folders(
        "hf-encoder",
        folder / "base",
        {task: folder / task for task in data},
        {"defaults": {"n": 12, "n_diagnosis": 6, "batch_size": 5}, **data},
        merge={"method": "average"},
    )


def embeddings(folder: Path, seed: int, texts: list[str], prompt: str = "") -> torch.Tensor:
    """What transformers makes of each text alone, pooled, mapped and normalised by hand."""
    model, tokenizer = embedder("BERT", seed), tokenizer_of("BERT")
    weight = load_file(folder / "base" / "2_Dense" / "model.safetensors")["linear.weight"]
    made = []
    for text in texts:
        ids = tokenizer(prompt + text, truncation=True, max_length=7)["input_ids"]
        with torch.no_grad():
            made.append(model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0))
    return F.normalize(torch.stack(made) @ weight.T, dim=1)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dl.DriftRun]:
    folder = tmp_path_factory.mktemp("embeddings")
    data = entries(folder)
    run = dl.analyze(spec_of(folder, data), out=folder / "run", progress="none")
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=folder / "saved")
    return folder, data, dl.open_run(folder / "run")


def test_pairs_are_scored_by_how_alike_their_embeddings_are(
    measured: tuple[Path, dict[str, Any], dl.DriftRun],
) -> None:
    folder, data, run = measured
    rows = rows_of(data["sts"])
    for variant, seed in (("base", 0), ("expert", 1)):
        sides = [embeddings(folder, seed, [row[name] for row in rows]) for name in ("text", "other")]
        alike = (sides[0] * sides[1]).sum(1).numpy()
        stored = run.scores("sts", variant)
        np.testing.assert_allclose(stored["value"].astype(float), alike, atol=1e-5)
        (score,) = run.accuracy("sts", variant).to_dict("records")
        assert score["metric"] == "spearman" and score["n"] == len(rows)
        assert score["value"] == pytest.approx(spearmanr(alike, [row["score"] for row in rows])[0], abs=1e-6)
        assert score["ci_low"] < score["value"] < score["ci_high"]


@pytest.mark.parametrize("task", ["topics", "rerank"])
def test_queries_are_scored_by_where_what_answers_them_is_ranked(
    task: str, measured: tuple[Path, dict[str, Any], dl.DriftRun]
) -> None:
    folder, data, run = measured
    seed = list(data).index(task) + 1
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().split("\n")]
    queries = rows_of(data[task])
    asked = embeddings(folder, seed, [row["text"] for row in queries], PROMPTS["query"])
    wanted: dict[str, list[float]] = {}
    for row, query in zip(queries, asked, strict=True):
        if task == "topics":
            passages = list(dict.fromkeys(one["passage"] for one in corpus))
            right = {one["passage"] for one in corpus if one["topic"] == row["topic"]}
        else:
            passages, right = [*row["bad"], *row["good"]], set(row["good"])
        alike = embeddings(folder, seed, passages, PROMPTS["document"]) @ query
        ranked = [passages[at] in right for at in alike.argsort(descending=True, stable=True)]
        for name, value in by_hand(ranked, len(right)).items():
            wanted.setdefault(name, []).append(value)
    found = run.accuracy(task, "expert").set_index("metric")
    for name, values in wanted.items():
        assert found.loc[name, "value"] == pytest.approx(np.mean(values), abs=1e-9), name
        assert found.loc[name, "ci_low"] <= found.loc[name, "value"] <= found.loc[name, "ci_high"]


def test_scores_of_embeddings_stand_in_the_verdict_with_intervals_of_changes(
    measured: tuple[Path, dict[str, Any], dl.DriftRun],
) -> None:
    folder, _, run = measured
    first, *others = verdict(run).sentences
    assert "Score (nDCG@10, Spearman correlation) (3 tasks, n = 40)" in first
    assert any("featcal" in text and "+-" in text for text in others)
    table = run.before_after("featcal").set_index(["task", "variant"])
    for task, metric in (("sts", "spearman"), ("topics", "ndcg@10"), ("rerank", "ndcg@10")):
        row = table.loc[(task, "calibrated:featcal")]
        assert row["metric"] == metric and row["low"] <= row["score"] <= row["high"]
    assert run.layers()["closure_error"].max() < 1e-4
    assert run.manifest.model_kinds == ("embeddings", "hf-encoder")
    card = (folder / "saved" / "README.md").read_text()
    for word in ("library_name: sentence-transformers", r"| ndcg\@10 |"):
        assert word in card


def test_embeddings_of_the_repaired_folder_are_those_that_were_measured(
    measured: tuple[Path, dict[str, Any], dl.DriftRun],
) -> None:
    folder, data, run = measured
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "saved"), device="cpu")
    rows = rows_of(data["sts"])
    sides = [model.encode([row[name] for row in rows]) for name in ("text", "other")]
    stored = run.scores("sts", "calibrated:featcal")["value"].astype(float)
    np.testing.assert_allclose(stored, (sides[0] * sides[1]).sum(1), atol=1e-5)
