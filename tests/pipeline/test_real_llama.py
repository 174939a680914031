"""Llamas trained on real texts, one of them in shards: merged, measured, calibrated, reported, and given back."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch
import transformers

import driftlens as dl
from driftlens.calibration.featcal import PRESETS
from driftlens.cli import main

TASKS = ("equation", "pos", "trec")
N_TEST = 100


@pytest.mark.family("Llama")
@pytest.mark.shows("drift", "attribution", files="hf-decoder", heads="each model's own", reloads="yes")
@pytest.mark.slow
def test_trained_llamas_are_merged_measured_calibrated_and_reported(
    real: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    texts = real.parent / "real_text"
    if not texts.is_dir():
        pytest.skip("the real texts are not here")
    data = {
        task: {
            "kind": "jsonl",
            "calibration": str(texts / "data" / task / "train.jsonl"),
            "test": str(texts / "data" / task / "test.jsonl"),
            "prompt": "{input}\nanswer:",
            "metric": "exact_match",
        }
        for task in TASKS
    }
    spec = {
        "version": 1,
        "name": "llama",
        "architecture": {"loader": "hf-decoder", "source": str(texts / "llama" / "base")},
        "base": {"weights": str(texts / "llama" / "base")},
        "experts": {task: {"weights": str(texts / "llama" / task)} for task in TASKS},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "data": {"defaults": {"n": 128, "n_diagnosis": 32, "n_test": N_TEST, "batch_size": 16}, **data},
        "metrics": {"jacobian": {"samples": 2}},
    }
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    for task in TASKS:
        rows = run.layers(task, "merged")
        assert rows["closure_error"].max() < 1e-4 and rows["jacobian_error"].max() < 1e-2
    calibrator = dl.FeatCal(**PRESETS["llama-3b"])
    run = run.calibrate(calibrator, name="featcal", save_weights=tmp_path / "out", progress="none")
    history = run.calibration("featcal")
    assert len(history) == 4 * 7
    assert (history["objective_after"] < history["objective_before"]).all()
    final = {
        variant: np.mean([run.layers(task, variant).iloc[-1]["drift_rel"] for task in TASKS])
        for variant in ("base", "merged", "calibrated:featcal")
    }
    assert final["calibrated:featcal"] < 0.85 * final["merged"] < final["merged"] < final["base"]
    scores = run.accuracy().query("metric == 'exact_match'").groupby("variant")["value"].mean()
    gap = scores["expert"] - scores["merged"]
    assert gap > 0.05 and scores["calibrated:featcal"] > scores["merged"] + 0.15 * gap
    # What transformers answers with the saved folder, one question at a time.
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.get_output_embeddings().weight is saved.get_input_embeddings().weight
    answers = run.scores().query(
        "variant == 'calibrated:featcal' and task == 'trec' and metric == 'exact_match'"
    )
    lines = (texts / "data" / "trec" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    for _, row in answers.head(12).iterrows():
        asked = json.loads(lines[int(row["sample_id"].rpartition(":")[2]) - 1])
        inputs = tokenizer(f"{asked['input']}\nanswer:", return_tensors="pt")
        ids = saved.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        said = tokenizer.decode(ids, skip_special_tokens=True)
        assert float(said.strip().lower() == asked["target"].lower()) == row["value"]
    with pytest.raises(SystemExit) as left:
        main(["report", str(tmp_path / "run")])
    page = (tmp_path / "run" / "reports" / "report.html").read_text(encoding="utf-8")
    assert not left.value.code and "exact match" in page.lower().replace("_", " ")
