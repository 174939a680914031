"""What `driftlens init` offers runs on folders laid out like the Hub's: tiny models, a few rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import transformers
from PIL import Image

import driftlens as dl
from driftlens.config.packaged import spec_template
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import CONFIGS
from tests.zoo.small import flan_t5, small
from tests.zoo.tokenizers import word_tokenizer

ROWS = 24
WORDS = ("is", "it", "red", "green", "blue", "yes", "no", "?", "negative", "positive")
FEW = ["data.defaults.n=8", "data.defaults.n_diagnosis=8", "data.defaults.n_test=8"]


def lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        texts = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    else:
        texts = [json.dumps(row) for row in rows]
    file.write_text("\n".join(texts) + "\n")


def both(folder: Path, ending: str, rows: list[dict[str, Any]]) -> None:
    lines(folder / f"train{ending}", rows[::2])
    lines(folder / f"test{ending}", rows[1::2])


def texts(key: str, target: str, answers: list[Any]) -> list[dict[str, Any]]:
    asked = ["is it red", "is it green ?", "question : blue or red ?", "no"]
    return [{key: f"{asked[at % 4]} {at}", target: answers[at % len(answers)]} for at in range(ROWS)]


def t5(models: Path, data: Path) -> None:
    base = flan_t5()
    for module, name in ((base, "base"), (perturbed(base, 1, 0.05), "rte")):
        module.save_pretrained(models / name)
        word_tokenizer("encoder-decoder", words=WORDS).save_pretrained(models / name)
    adapters = peft.LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False)
    peft.get_peft_model(base, adapters).save_pretrained(models / "sst2-lora")
    rows = [
        {"sentence1": row["text"], "sentence2": "it is red", "label": row["label"]}
        for row in texts("text", "label", [0, 1])
    ]
    split = {
        "train": datasets.Dataset.from_list(rows[::2]),
        "validation": datasets.Dataset.from_list(rows[1::2]),
    }
    datasets.DatasetDict(split).save_to_disk(data / "rte")
    both(data / "sst2", ".jsonl", texts("sentence", "label", [0, 1]))


def llama(models: Path, data: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_config(CONFIGS["Llama"])
    for seed, name in enumerate(("base", "math", "topics")):
        perturbed(base, seed, 0.05 * bool(seed)).save_pretrained(models / name)
        tokenizer = word_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %} :"
        tokenizer.save_pretrained(models / name)
    both(data / "math", ".jsonl", texts("problem", "solution", ["red blue", "green"]))
    both(data / "topics", ".csv", texts("text", "topic", ["yes", "no"]))


def bert(models: Path, data: Path) -> None:
    for seed, (name, classes) in enumerate({"base": None, "topics": ("a", "b"), "reviews": ("c", "d")}.items()):
        sizes: dict[str, Any] = {"vocab_size": 40, "max_position_embeddings": 64}
        sizes |= {} if classes is None else {"id2label": dict(enumerate(classes))}
        plain = with_seed(partial(small, "BertForSequenceClassification", **sizes))()
        model = perturbed(plain, seed, 0.05)
        (model.bert if classes is None else model).save_pretrained(models / name)
        word_tokenizer("encoder").save_pretrained(models / name)
    both(data / "topics", ".csv", texts("text", "topic", ["a", "b"]))
    both(data / "reviews", ".jsonl", texts("text", "label", ["c", "d"]))


def vit(models: Path, data: Path) -> None:
    for seed, (name, classes) in enumerate({"base": None, "cars": ("a", "b"), "birds": ("c", "d")}.items()):
        sizes: dict[str, Any] = {"image_size": 16, "patch_size": 8}
        sizes |= {} if classes is None else {"id2label": dict(enumerate(classes))}
        plain = with_seed(partial(small, "ViTForImageClassification", **sizes))()
        model = perturbed(plain, seed, 0.05)
        (model.vit if classes is None else model).save_pretrained(models / name)
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = []
        for at in range(ROWS // 2):
            picture = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
            for place in (data / "cars" / split / "ab"[at % 2], data / "birds" / "all"):
                place.mkdir(parents=True, exist_ok=True)
                picture.save(place / f"{split}-{at}.png")
            rows.append({"path": f"all/{split}-{at}.png", "label": "cd"[at % 2]})
        lines(data / "birds" / f"{split}.csv", rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tied:UserWarning")
@pytest.mark.parametrize(
    ("name", "hub", "lay_out"),
    [
        pytest.param("flan-t5", "google/flan-t5-base", t5, marks=pytest.mark.every),
        ("llama", "meta-llama/Llama-3.2-3B-Instruct", llama),
        pytest.param("bert", "google-bert/bert-base-uncased", bert, marks=pytest.mark.every),
        ("vit", "google/vit-base-patch16-224-in21k", vit),
    ],
)
def test_what_is_offered_runs(name: str, hub: str, lay_out: Callable[[Path, Path], None], tmp_path: Path) -> None:
    lay_out(tmp_path / "models", tmp_path / "data")
    spec = tmp_path / "run.yaml"
    spec.write_text(spec_template(name).replace(hub, str(tmp_path / "models" / "base")))
    run = dl.analyze(spec, out=tmp_path / "run", overrides=FEW)
    assert run.layers(run.tasks[0], "merged")["closure_error"].max() < 1e-4
    run = dl.calibrate(run, name="first")
    assert set(run.accuracy()["variant"]) >= {"base", "expert", "merged", "calibrated:first"}
