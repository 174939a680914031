"""Models that were trained on real images and texts: merged, measured, calibrated, reported, and given back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import driftlens as dl
from driftlens.calibration.featcal import PRESETS
from driftlens.cli import main
from driftlens.results.measures import SCORE, change_on_task
from driftlens.results.verdict import verdict
from tests.zoo.suite import real_files_of, spec_of_folders

Inputs = dict[str, Tensor]
TASKS = ("fashion_mnist", "sign_digits")
SIZE = 32
pytestmark = pytest.mark.slow


def images(real: Path, task: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels as the processor makes them, and labels: as many to train on as tell classes apart, and test."""
    with np.load(real / "data" / f"{task}.npz") as file:
        x, y = (file[name][:1500] for name in ("x_train", "y_train"))
        test, right = file["x_test"], file["y_test"]
    train, held_out = (torch.from_numpy(part).permute(0, 3, 1, 2) / 127.5 - 1 for part in (x, test))
    return train, torch.from_numpy(y).long(), held_out, torch.from_numpy(right).long()


def vit(classes: int) -> Any:
    config = transformers.ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=8,
        hidden_dropout_prob=0.0,
        num_labels=classes,
    )
    return transformers.ViTForImageClassification(config)


def train(model: nn.Module, data: list[tuple[Inputs, Tensor]], epochs: int, rate: float) -> None:
    """On batches of several tasks in turns, whose labels are told apart by the caller."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(epochs):
        for x, y in data:
            for rows in torch.randperm(len(y), generator=generator).split(64):
                optimizer.zero_grad()
                given = {name: value[rows] for name, value in x.items()}
                F.cross_entropy(model(**given).logits, y[rows]).backward()
                optimizer.step()
    model.eval()


def accuracy(model: nn.Module, x: Inputs, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(**x).logits.argmax(dim=1) == y).float().mean())


@pytest.mark.family("ViT (transformers)")
@pytest.mark.every
@pytest.mark.shows("drift", heads="classifier of each expert")
def test_trained_classifiers_are_merged_measured_and_calibrated(real: Path, tmp_path: Path) -> None:
    data = {task: images(real, task) for task in TASKS}
    base = vit(20)
    # One base for both: the second task's classes follow the first's.
    both = [({"pixel_values": x}, y + 10 * at) for at, (x, y, _, _) in enumerate(data.values())]
    train(base, both, epochs=3, rate=1e-3)
    processor = transformers.ViTImageProcessor(
        size={"height": SIZE, "width": SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    base.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    right = {}
    for task, (x, y, test, labels) in data.items():
        expert = vit(10)
        expert.vit.load_state_dict(base.vit.state_dict())
        train(expert, [({"pixel_values": x}, y)], epochs=6, rate=5e-4)
        expert.save_pretrained(tmp_path / task)
        right[task] = accuracy(expert, {"pixel_values": test}, labels)
    files = {task: {"kind": "npz", "file": str(real / "data" / f"{task}.npz")} for task in TASKS}
    spec = spec_of_folders(
        "hf-vit",
        tmp_path / "base",
        {task: tmp_path / task for task in TASKS},
        {"defaults": {"n": 64, "n_diagnosis": 128}, **files},
        merge={"method": "task_arithmetic", "scaling": 0.5},
        metrics={"jacobian": {"nodes": 8, "samples": 4}},
    )
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    run = run.calibrate(dl.FeatCal(), name="featcal", attribution=False)
    found = run.accuracy().set_index(["variant", "task"])["value"]
    for task in TASKS:
        assert found["expert", task] == pytest.approx(right[task], abs=2 / len(data[task][2]))
        assert found["merged", task] < right[task] - 0.02, "there is nothing to repair"
    layers = run.layers()
    assert layers["closure_error"].max() < 1e-4 and layers["jacobian_error"].max() < 1e-3
    final = layers[layers["layer"] == layers["layer"].max()].groupby("variant")["drift_rel"].mean()
    assert final["calibrated:featcal"] < final["merged"]
    # Losses are told as losses, and what its interval does not tell from nothing as neither.
    (gap,) = [gap for gap in verdict(run).gaps if gap.against == "merged"]
    for task in TASKS:
        row = change_on_task(run, SCORE, task, ("merged", "calibrated:featcal"))
        assert (task in gap.better) == (row.low > 0) and (task in gap.worse) == (row.high < 0), row


EXPERTS = {"trec": "t5/trec", "subj": "t5/subj", "pos": "t5-lora/pos"}


LLAMAS = ("equation", "pos", "trec")


@pytest.mark.family("Llama")
@pytest.mark.shows("drift", "attribution", files="hf-decoder", heads="each model's own", reloads="yes")
@pytest.mark.slow
def test_trained_llamas_are_merged_measured_calibrated_and_reported(real: Path, tmp_path: Path) -> None:
    texts = real.parent / "real_text"
    if not texts.is_dir():
        pytest.skip("the real texts are not here")
    data = {task: real_files_of(texts, task, prompt="{input}\nanswer:", metric="exact_match") for task in LLAMAS}
    spec = spec_of_folders(
        "hf-decoder",
        texts / "llama" / "base",
        {task: texts / "llama" / task for task in LLAMAS},
        {"defaults": {"n": 128, "n_diagnosis": 32, "n_test": 100, "batch_size": 16}, **data},
        metrics={"jacobian": {"samples": 2}},
    )
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    for task in LLAMAS:
        rows = run.layers(task, "merged")
        assert rows["closure_error"].max() < 1e-4 and rows["jacobian_error"].max() < 1e-2
    calibrator = dl.FeatCal(**PRESETS["llama-3b"])
    run = run.calibrate(calibrator, name="featcal", save_weights=tmp_path / "out", progress="none")
    history = run.calibration("featcal")
    assert len(history) == 4 * 7
    assert (history["objective_after"] < history["objective_before"]).all()
    final = {
        variant: np.mean([run.layers(task, variant).iloc[-1]["drift_rel"] for task in LLAMAS])
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
    answers = run.scores().query("variant == 'calibrated:featcal' and task == 'trec' and metric == 'exact_match'")
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
