"""Encoders of texts from their folders to a calibrated one: own heads of the experts, saved for their library."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.config.spec import load_spec
from driftlens.experiment.study_loading import open_study
from driftlens.models.architecture import load_architecture
from driftlens.models.readouts import ExpertHead
from driftlens.pipelines.validate import preflight
from driftlens.utils.errors import SpecError
from tests.quick import few, paced
from tests.zoo.encoders import PARAMS, encoder, logits, save
from tests.zoo.suite import files_of, spec_of_folders
from tests.zoo.tensors import assert_every_tensor, site_keys
from tests.zoo.tokenizers import WORDS, word_tokenizer

TASKS = {"colours": ("red", "green", "blue"), "answers": ("yes", "no")}
CALIBRATED = 12


class Suite:
    """Base and experts of one family on disk and in memory, and texts whose labels the experts mostly get right."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.tokenizer = folder, word_tokenizer("encoder")
        self.base = encoder(name, 4, seed=0)
        save(self.base, folder / "base")
        draw = np.random.default_rng(0)
        self.texts = [" ".join(draw.choice(WORDS, size=1 + row % 7)) for row in range(2 * CALIBRATED)]
        self.experts, self.labels, data = {}, {}, {}
        for seed, (task, names) in enumerate(TASKS.items(), start=1):
            # Near the base but for the head, of which every task has its own.
            self.experts[task] = encoder(name, len(names), seed=0)
            near = encoder(name, 4, seed=0, scale=0.2)
            generator = torch.Generator().manual_seed(seed)
            state = self.experts[task].state_dict()
            for key, value in near.state_dict().items():
                if value.is_floating_point() and state[key].shape == value.shape:
                    state[key].copy_(value + 0.05 * torch.randn(value.shape, generator=generator))
            save(self.experts[task], folder / task, names)
            self.labels[task] = [
                names[(int(row) + (at % 4 == 0)) % len(names)]
                for at, row in enumerate(self.predictions(self.experts[task]))
            ]
            self.labels[task][CALIBRATED : CALIBRATED + len(names)] = names  # every class occurs
            for split, rows in (("train", range(CALIBRATED)), ("test", range(CALIBRATED, 2 * CALIBRATED))):
                lines = [json.dumps({"input": self.texts[at], "target": self.labels[task][at]}) for at in rows]
                (folder / f"{task}-{split}.jsonl").write_text("\n".join(lines))
            data[task] = files_of(folder, task, classes=True)
        self.spec = spec_of_folders(
            "hf-encoder",
            folder / "base",
            {task: folder / task for task in TASKS},
            {"defaults": {"n": CALIBRATED, "n_diagnosis": CALIBRATED, "batch_size": 5}, **data},
            merge={"method": "task_arithmetic", "scaling": 0.4},
            heads={"answers": {"linear": "own"}},
            metrics={"jacobian": {"samples": 3}},
        )

    def predictions(self, model: Any) -> np.ndarray[Any, Any]:
        inputs = dict(self.tokenizer(self.texts, padding=True, return_tensors="pt"))
        return logits(model, inputs).argmax(dim=1).numpy()

    def accuracy(self, task: str, model: Any) -> float:
        found = self.predictions(model)[CALIBRATED:]
        return float(np.mean([TASKS[task][row] for row in found] == np.array(self.labels[task][CALIBRATED:])))


@pytest.mark.shows("attribution", "reloads", sites="yes")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(*param.values, marks=[*param.marks, *paced(param.values[0], (), ["BERT", "DeBERTa-v3"])])
        for param in PARAMS
    ],
)
def test_an_encoder_is_measured_calibrated_and_reloaded(name: str, tmp_path: Path) -> None:
    suite = Suite(name, tmp_path)
    run = dl.analyze(suite.spec, out=tmp_path / "run", progress="none")
    rows = run.layers(variant="merged")
    assert rows["closure_error"].max() < 1e-4 and rows["jacobian_error"].max() < 1e-3
    shares = rows.groupby("task")[["final_share", "remainder_share"]].sum().sum(axis=1)
    assert np.allclose(shares, 1, atol=1e-6)
    outputs = run.outputs()
    assert (outputs["score_drift_l2"] <= outputs["score_bound"] * (1 + 1e-6)).all()
    accuracy = run.accuracy().set_index(["task", "variant"])["value"]
    merged = open_checkpoint(tmp_path / "run" / "models" / "merged.safetensors")
    for task, expert in suite.experts.items():
        assert accuracy[task, "expert"] == pytest.approx(suite.accuracy(task, expert))
        whole = copy.deepcopy(expert)  # the merged model in its library, with the head of the task's expert
        state, head = whole.state_dict(), _head(whole)
        for key in state.keys() & merged.headers.keys() - head:
            state[key].copy_(merged.read(key))
        assert accuracy[task, "merged"] == pytest.approx(suite.accuracy(task, whole))
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    assert_every_tensor(
        tmp_path / "base",
        [tmp_path / task for task in TASKS],
        tmp_path / "saved",
        scaling=0.4,
        heads=tuple(_head(suite.base)),
        solved=site_keys(load_architecture("hf-encoder", str(tmp_path / "base")), tmp_path / "base"),
    )
    notices = dl.open_run(tmp_path / "run").manifest.notices
    assert any("task-specific" in text and "classifier" in text for text in notices)
    accuracy = dl.open_run(tmp_path / "run").accuracy().set_index(["task", "variant"])["value"]
    for task in TASKS:
        used = used_with_head(tmp_path / "saved", task)
        assert accuracy[task, "calibrated:featcal"] == pytest.approx(suite.accuracy(task, used))
    reloaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for key in _head(suite.base):
        assert torch.equal(reloaded.state_dict()[key], suite.base.state_dict()[key])
    inputs = tokenizer(suite.texts[CALIBRATED:], padding=True, return_tensors="pt")
    with torch.no_grad():
        known = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        found = reloaded.base_model(**known).last_hidden_state[:, 0].numpy()
    stored = dl.open_run(tmp_path / "run").features("colours", "calibrated:featcal", "final")
    order = dl.open_run(tmp_path / "run").samples("colours", "merged", layer="final")["sample_id"]
    lines = [int(str(sample).rpartition(":")[2]) for sample in order]
    np.testing.assert_allclose(stored, found[np.array(lines) - min(lines)], rtol=0, atol=5e-3)
    assert "classifier" in (tmp_path / "saved" / "README.md").read_text()


def used_with_head(folder: Path, task: str) -> Any:
    """The model of a saved folder with a task's own head, by the lines that its card has."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert all(f"heads/{task}.safetensors" in code for task in TASKS)
    code = re.sub(r"heads/\w+\.safetensors\"\)", f'heads/{task}.safetensors")', code)
    names: dict[str, Any] = {}
    with contextlib.chdir(folder):
        exec(code, names)
    assert names["scores"].shape == (1, len(TASKS[task]))
    return names["model"]


@pytest.mark.slow
def test_a_classifier_whose_rows_nobody_names_is_followed_without_labels(tmp_path: Path) -> None:
    models = [encoder("BERT", 3, seed) for seed in (1, 2)]
    folders = [save(model, tmp_path / f"{number}") for number, model in enumerate(models)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"input": word}) for word in WORDS[:9]))
    texts = {"kind": "jsonl", **dict.fromkeys(("calibration", "test"), str(tmp_path / "texts.jsonl"))}
    data = {"defaults": {"n": 3, "n_diagnosis": 6}, "task": texts}
    spec = spec_of_folders("hf-encoder", folders[0], {"task": folders[1]}, data)
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    rows = run.outputs("task", "base")
    inputs = word_tokenizer("encoder")(WORDS[:9], padding=True, return_tensors="pt")
    best = logits(models[1], dict(inputs)).argmax(dim=1)
    assert [*rows["expert_pred"]] == [str(int(best[int(sample) - 1])) for sample in rows["sample_id"]]
    assert run.manifest.classes == {"task": ["0", "1", "2"]} and run.accuracy().empty


def _head(model: Any) -> set[str]:
    """Names of all weights behind the features of tokens."""
    core = f"{model.base_model_prefix}."
    return {key for key in model.state_dict() if not key.startswith(core) or key.startswith(f"{core}pooler.")}


def test_features_are_pooled_as_heads_read_them_and_by_their_mean_without(tmp_path: Path) -> None:
    suite = Suite("BERT", tmp_path)
    study, models = open_study(load_spec(suite.spec))
    assert study.settings.pool == "cls" and models.architecture.chain.modality.pool == "mean"
    heads = [at.head for at in study.tasks.values()]
    assert all(isinstance(head, ExpertHead) for head in heads)
    assert [head.classes for head in heads if head] == [TASKS[task] for task in study.tasks]
    with pytest.raises(SpecError, match="pools by 'cls'"):
        open_study(load_spec({**suite.spec, "layers": {"pool": "mean"}}))
    found = preflight(load_spec(suite.spec))
    assert not found.problems, found.problems
    for task in TASKS:  # as sentence encoders are saved: a core alone, with no classifier
        save(suite.experts[task].bert, tmp_path / task)
    spec = {key: value for key, value in suite.spec.items() if key != "heads"}
    study, _ = open_study(load_spec(spec))
    assert study.settings.pool == "mean" and all(at.head is None for at in study.tasks.values())
    assert not any("task's own" in text for text in study.notices)
    assert any("the mean over its tokens" in text for text in study.notices)


@pytest.mark.slow
@pytest.mark.family("BERT")
@pytest.mark.shows("reloads", files="hf-auto", heads="classifier of each expert")
def test_an_encoder_means_one_thing_through_both_loaders(tmp_path: Path) -> None:
    suite = Suite("BERT", tmp_path)
    runs = {}
    for loader in ("hf-encoder", "hf-auto"):
        architecture = {**suite.spec["architecture"], "loader": loader}
        spec = {**suite.spec, "architecture": architecture, "metrics": {"jacobian": False}}
        runs[loader] = dl.analyze(spec, out=tmp_path / loader, progress="none")
    run, drifts = runs["hf-auto"], [at.layers()["drift_l2_mean"] for at in runs.values()]
    pd.testing.assert_series_equal(*drifts, rtol=1e-6)
    assert run.layers()["closure_error"].max() < 1e-4
    run = run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "out")
    accuracy = run.accuracy().set_index(["task", "variant"])["value"]
    for task, expert in suite.experts.items():
        assert accuracy[task, "expert"] == pytest.approx(suite.accuracy(task, expert))
        model, info = type(expert).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values()), info
        model.eval().classifier, model.bert.pooler = expert.classifier, expert.bert.pooler
        assert accuracy[task, "calibrated:featcal"] == pytest.approx(suite.accuracy(task, model))


@pytest.mark.parametrize("name", few(["RoBERTa", "DeBERTa-v3"], (), some=["RoBERTa"]))
def test_padding_weighs_nothing_in_calibrated_weights(name: str, tmp_path: Path) -> None:
    suite, saved = Suite(name, tmp_path), {}
    for size in (1, 6):  # alone, no text is padded
        spec = copy.deepcopy(suite.spec)
        spec["data"]["defaults"]["batch_size"] = size
        spec |= {"metrics": {"jacobian": False}, "compute": {"dtype": "float64"}}
        run = dl.analyze(spec, out=tmp_path / f"run-{size}", progress="none")
        run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / f"{size}.safetensors")
        saved[size] = open_checkpoint(tmp_path / f"{size}.safetensors")
    for key in saved[1].headers:
        one, other = saved[1].read(key), saved[6].read(key)
        assert (one - other).norm() <= 1e-6 * one.norm()
