"""Image classifiers that were trained on real images, each with its own head: drift, accuracy, and losses as losses."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import driftlens as dl
from driftlens.findings.measures import SCORE, change
from driftlens.findings.verdict import verdict

Inputs = dict[str, Tensor]
TASKS = ("fashion_mnist", "sign_digits")
SIZE = 32
pytestmark = pytest.mark.slow


def images(real: pathlib.Path, task: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels as the processor makes them, and labels: train, test."""
    with np.load(real / "data" / f"{task}.npz") as file:
        x, y, test, right = (file[name] for name in ("x_train", "y_train", "x_test", "y_test"))
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
@pytest.mark.shows("drift", heads="classifier of each expert")
def test_trained_classifiers_are_merged_measured_and_calibrated(
    real: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    data = {task: images(real, task) for task in TASKS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
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
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-vit", "source": str(tmp_path / "base")},
        "base": {"weights": str(tmp_path / "base")},
        "merge": {"method": "task_arithmetic", "scaling": 0.5},
        "experts": {task: {"weights": str(tmp_path / task)} for task in TASKS},
        "data": {
            "defaults": {"n": 64, "n_diagnosis": 128},
            **{task: {"kind": "npz", "file": str(real / "data" / f"{task}.npz")} for task in TASKS},
        },
        "metrics": {"jacobian": {"nodes": 8, "samples": 4}},
    }
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
        row = change(run, SCORE, task, ("merged", "calibrated:featcal"))
        assert (task in gap.better) == (row.low > 0) and (task in gap.worse) == (row.high < 0), row


TEXTS = ("subj", "trec")


@pytest.mark.family("BERT")
@pytest.mark.shows("drift", heads="classifier of each expert")
def test_trained_encoders_are_merged_measured_and_calibrated(
    real: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    texts = real.parent / "real_text"
    if not texts.is_dir():
        pytest.skip("the real texts are not here")
    tokenizer = transformers.AutoTokenizer.from_pretrained(texts / "tokenizers" / "t5")
    rows = {
        (task, split): [
            json.loads(line)
            for line in (texts / "data" / task / f"{split}.jsonl").read_text(encoding="utf-8").split("\n")
            if line
        ]
        for task in TEXTS
        for split in ("train", "test")
    }
    names = {task: sorted({row["target"] for row in rows[task, "train"]}) for task in TEXTS}

    def bert(classes: int) -> Any:
        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=96,
            pad_token_id=tokenizer.pad_token_id,
            hidden_dropout_prob=0.0,
            num_labels=classes,
        )
        return transformers.BertForSequenceClassification(config)

    def batch(task: str, split: str) -> tuple[Any, Tensor]:
        given = tokenizer([row["input"] for row in rows[task, split]], padding=True, return_tensors="pt")
        found = torch.tensor([names[task].index(row["target"]) for row in rows[task, split]])
        return {key: given[key] for key in ("input_ids", "attention_mask")}, found

    sizes = {task: len(of) for task, of in names.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = bert(sum(sizes.values()))
    both = [
        (x, y + shift)
        for shift, (x, y) in zip((0, sizes["subj"]), (batch(t, "train") for t in TEXTS), strict=True)
    ]
    train(base, both, epochs=1, rate=1e-3)
    right = {}
    for name, model in {"base": base, **{task: bert(size) for task, size in sizes.items()}}.items():
        if name in TEXTS:
            model.bert.load_state_dict(base.bert.state_dict())
            train(model, [batch(name, "train")], epochs=2, rate=5e-4)
            model.config.id2label = dict(enumerate(names[name]))
            model.config.label2id = {label: row for row, label in enumerate(names[name])}
            right[name] = accuracy(model, *batch(name, "test"))
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    data = {
        task: {
            "kind": "jsonl",
            "classes": True,
            "calibration": str(texts / "data" / task / "train.jsonl"),
            "test": str(texts / "data" / task / "test.jsonl"),
        }
        for task in TEXTS
    }
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-auto", "source": str(tmp_path / "base")},
        "base": {"weights": str(tmp_path / "base")},
        "merge": {"method": "average"},
        "experts": {task: {"weights": str(tmp_path / task)} for task in TEXTS},
        "data": {"defaults": {"n": 64, "n_diagnosis": 64}, **data},
        "metrics": {"jacobian": False},
    }
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    run = run.calibrate(dl.FeatCal(), name="featcal")
    found = run.accuracy().set_index(["variant", "task"])["value"]
    for task in TEXTS:
        assert found["expert", task] == pytest.approx(right[task], abs=2 / 400)
    layers = run.layers()
    assert layers["closure_error"].max() < 1e-4
    final = layers[layers["layer"] == layers["layer"].max()].groupby("variant")["drift_rel"].mean()
    assert final["calibrated:featcal"] < final["merged"]
