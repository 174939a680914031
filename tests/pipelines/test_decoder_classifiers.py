"""Classifiers and reward models made of decoders, from folders to calibrated ones that their library loads."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.stats import spearmanr

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.architecture import load_architecture
from driftlens.models.heads import linear_head
from tests.quick import paced
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import CONFIGS, MORE
from tests.zoo.suite import files_of, spec_of_folders
from tests.zoo.tensors import assert_every_tensor, site_keys
from tests.zoo.tokenizers import WORDS, word_tokenizer
from tests.zoo.walking import chain_states

TASKS = {"colours": ("red", "green", "blue"), "answers": ("yes", "no")}
NUM = 12
NAMES = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3.5", "Gemma", "Gemma 2", "Gemma 3", "Phi-3", "GPT-2"),
    *("OPT", "Falcon", "GPT-NeoX", "OLMo 2", "GLM 4", "SmolLM3", "Seed-OSS", "StableLM", "EXAONE 4", "MPT"),
)
LLAMA = [pytest.param("Llama", marks=pytest.mark.family("Llama"))]
SOME = ("Qwen3.5", "GPT-2")
PARAMS = [pytest.param(name, marks=[pytest.mark.family(name), *paced(name, (), SOME)]) for name in NAMES]


def classifier(name: str, count: int, seed: int, pad: int | None = 0) -> Any:
    """A decoder with so many scores, near those of all other seeds but for its head."""
    config = deepcopy((CONFIGS | MORE)[name])
    config.num_labels, config.pad_token_id = count, pad
    kind = transformers.AutoModelForSequenceClassification
    return perturbed(perturbed(with_seed(lambda: kind.from_config(config))(), 0, 0.2), seed, 0.05).eval()


def save(model: Any, folder: Path, names: tuple[str, ...] = ()) -> Path:
    if names:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {label: row for row, label in enumerate(names)}
    model.save_pretrained(folder)
    word_tokenizer("decoder").save_pretrained(folder)
    return folder


def scores(model: Any, texts: list[str], folder: Path) -> torch.Tensor:
    """What the library says of each text alone, in float64, by the tokenizer that it makes of the folder's files."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        model = deepcopy(model).double().eval()
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])


def spec_of(folder: Path, rows: dict[str, list[dict[str, Any]]], **entry: Any) -> dict[str, Any]:
    for task, lines in rows.items():
        for split, part in (("train", lines[:NUM]), ("test", lines[NUM:])):
            (folder / f"{task}-{split}.jsonl").write_text("\n".join(map(json.dumps, part)))
    data = {"defaults": {"n": NUM, "n_diagnosis": NUM, "batch_size": 5}}
    return spec_of_folders(
        "hf-auto",
        folder / "base",
        {task: folder / task for task in rows},
        data | {task: files_of(folder, task, **entry) for task in rows},
        merge={"method": "task_arithmetic", "scaling": 0.4},
        metrics={"jacobian": {"samples": 2}},
        compute={"dtype": "float64"},
    )


def texts() -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS, size=1 + row % 7)) for row in range(2 * NUM)]


@pytest.mark.shows(*("drift", "attribution", "sites", "reloads"), files="hf-auto", heads="classifier of each expert")
@pytest.mark.parametrize("name", PARAMS)
def test_a_classifier_is_measured_calibrated_and_reloaded(name: str, tmp_path: Path) -> None:
    save(classifier(name, 4, 0), tmp_path / "base", ("w", "x", "y", "z"))
    experts, rows = {}, {}
    for seed, (task, names) in enumerate(TASKS.items(), 1):
        experts[task] = classifier(name, len(names), seed)
        save(experts[task], tmp_path / task, names)
        said = scores(experts[task], texts(), tmp_path / task).argmax(dim=1).tolist()
        labels = [names[(row + (at % 4 == 0)) % len(names)] for at, row in enumerate(said)]
        labels[NUM : NUM + len(names)] = names  # every class occurs
        rows[task] = [{"input": text, "target": label} for text, label in zip(texts(), labels, strict=True)]
    run = dl.analyze(spec_of(tmp_path, rows, classes=True), out=tmp_path / "run", progress="none")
    assert run.layers()["closure_error"].max() < 1e-9
    rows_of = run.layers(variant="merged").groupby("task")
    shares = rows_of[["final_share", "remainder_share"]].sum().sum(axis=1)
    assert np.allclose(shares, 1, atol=1e-6)
    run = run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    known = load_architecture("hf-auto", str(tmp_path / "base"))
    assert known.chain.modality.pool == "last"
    folders = tmp_path / "base", [tmp_path / task for task in TASKS]
    solved = site_keys(known, tmp_path / "base")
    assert_every_tensor(*folders, tmp_path / "saved", scaling=0.4, heads="score.", solved=solved)
    kind = transformers.AutoModelForSequenceClassification
    saved, info = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()) and saved.config.id2label == dict(enumerate("wxyz"))
    accuracy = run.accuracy().set_index(["task", "variant"])["value"]
    for task, expert in experts.items():
        saved.score = expert.score
        for variant, model in (("expert", expert), ("calibrated:featcal", saved)):
            said = [TASKS[task][row] for row in scores(model, texts()[NUM:], tmp_path / task).argmax(dim=1)]
            wanted = [row["target"] for row in rows[task][NUM:]]
            assert accuracy[task, variant] == pytest.approx(np.mean(np.equal(said, wanted))), variant


@pytest.mark.parametrize("pad", [0, 3, None], ids=["of the tokenizer", "another", "none"])
def test_the_score_is_read_at_the_last_token_whatever_pads_a_batch(pad: int | None, tmp_path: Path) -> None:
    """The library looks for the last token that doesn't pad, and takes no batch where none is said to."""
    model = classifier("Llama", 3, 1, pad)
    save(model, tmp_path / "model")
    known = load_architecture("hf-auto", str(tmp_path / "model"))
    stored = open_checkpoint(tmp_path / "model")
    source, classified = known.align(stored), known.classifier_source(stored)
    assert known.preprocess is not None and classified is not None
    head, wanted = linear_head(classified, None), scores(model, texts(), tmp_path / "model")
    weights = {key: source.read(key).double() for key in source.headers}
    for order in ([*range(12)], [7, 2, 11], [4]):
        inputs = known.preprocess([(texts()[at], "") for at in order])
        features = chain_states(known.chain, weights, inputs)[-1]["hidden"]
        made = head.scores(features)
        assert (made - wanted[order]).norm() <= 1e-9 * wanted[order].norm()


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and an expert that give one number."""
    folder = tmp_path_factory.mktemp("reward")
    save(classifier("Llama", 1, 0), folder / "base")
    save(classifier("Llama", 1, 1), folder / "a")
    return folder


@pytest.mark.slow
@pytest.mark.family("Llama")
@pytest.mark.shows(heads="one score, of preferred texts or with numbers")
def test_a_reward_model_prefers_what_it_gives_more(reward: Path, tmp_path: Path) -> None:
    pairs = list(zip(texts(), texts()[5:] + texts()[:5], strict=True))
    rows = [{"chosen": one, "rejected": other, "number": str(row / 7)} for row, (one, other) in enumerate(pairs)]
    spec = spec_of(reward, {"a": rows}, input="chosen", target="rejected", metric="preference")
    run = dl.analyze(spec, out=tmp_path / "pairs", progress="none")
    expert = transformers.AutoModelForSequenceClassification.from_pretrained(reward / "a")
    better, worse = (scores(expert, list(side), reward / "a")[:, 0] for side in zip(*pairs[NUM:], strict=True))
    accuracy = run.accuracy().set_index("variant")
    assert set(accuracy["metric"]) == {"preference"}
    assert accuracy["value"]["expert"] == pytest.approx(float((better > worse).double().mean()))
    drift = run.outputs("a", "merged")["score_drift_l2"]
    assert drift.gt(0).all() and not any("names no classes" in text for text in run.manifest.notices)

    spec = spec_of(reward, {"a": rows}, input="chosen", target="number", metric="spearman")
    run = dl.analyze(spec, out=tmp_path / "numbers", progress="none")
    wanted = spearmanr(better, [float(row["number"]) for row in rows[NUM:]]).statistic
    assert run.accuracy().set_index("variant")["value"]["expert"] == pytest.approx(wanted)
