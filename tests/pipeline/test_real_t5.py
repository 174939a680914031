"""T5s trained on real texts, full and as adapters: merged, measured, calibrated, and given back to transformers."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
import torch
import transformers

import driftlens as dl

EXPERTS = {"trec": "t5/trec", "subj": "t5/subj", "pos": "t5-lora/pos"}


@pytest.mark.family("T5 (transformers)")
@pytest.mark.shows("drift", "attribution", files="hf-t5", heads="each model's own", reloads="yes")
@pytest.mark.slow
def test_trained_t5s_are_merged_measured_and_calibrated(real: pathlib.Path, tmp_path: pathlib.Path) -> None:
    texts = real.parent / "real_text"
    if not texts.is_dir():
        pytest.skip("the real texts are not here")
    data = {
        task: {
            "kind": "jsonl",
            "calibration": str(texts / "data" / task / "train.jsonl"),
            "test": str(texts / "data" / task / "test.jsonl"),
            "classes": True,
        }
        for task in EXPERTS
    }
    spec = {
        "version": 1,
        "name": "t5",
        "architecture": {"loader": "hf-t5", "source": str(texts / "t5" / "base")},
        "base": {"weights": str(texts / "t5" / "base")},
        "experts": {task: {"weights": str(texts / place)} for task, place in EXPERTS.items()},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "data": {"defaults": {"n": 64, "n_diagnosis": 16, "n_test": 16, "batch_size": 16}, **data},
        "metrics": {"jacobian": {"samples": 2}},
    }
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(spec))
    run = dl.analyze(file, out=tmp_path / "run", progress="none")
    for task in EXPERTS:
        rows = run.layers(task, "merged")
        assert rows["closure_error"].max() < 1e-4 and rows["jacobian_error"].max() < 1e-2
        assert rows.groupby("stream", sort=False)["layer"].max().to_dict() == {"encoder": 6, "hidden": 11}
    flan = dl.FeatCal(lam=1e-5, rho=2.0, alpha=0.6, update=("linear", "bias"))
    run = run.calibrate(
        flan, name="featcal", save_weights=tmp_path / "out", attribution=False, progress="none"
    )
    final = {
        variant: [run.layers(task, variant).iloc[-1]["drift_rel"] for task in EXPERTS]
        for variant in ("merged", "calibrated:featcal")
    }
    assert np.mean(final["calibrated:featcal"]) < 0.85 * np.mean(final["merged"])
    # The saved folder is the calibrated model, to the rounding of float16 in which the run keeps features.
    saved = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    features = tmp_path / "run" / "features" / "trec"
    lines = (texts / "data" / "trec" / "test.jsonl").read_text(encoding="utf-8").split("\n")
    asked = [
        json.loads(lines[int(name) - 1])["input"]
        for name in json.loads((features / "sample_ids.json").read_text())
    ]
    inputs = tokenizer(asked, padding=True, return_tensors="pt")
    with torch.no_grad():
        start = torch.zeros(len(asked), 1, dtype=torch.long)
        again = saved(**inputs, decoder_input_ids=start, output_hidden_states=True).decoder_hidden_states[-1]
    kept = np.load(features / "calibrated__featcal" / "011.npy").astype(np.float32)
    np.testing.assert_allclose(again[:, 0].numpy(), kept, rtol=1e-3, atol=1e-3)
    answers = tokenizer.batch_decode(saved.generate(**inputs, max_new_tokens=5), skip_special_tokens=True)
    assert set(answers) & set(run.outputs("trec", "merged")["label"])
