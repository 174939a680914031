"""Language models from files to a saved folder: drift, answers by each model's own head, calibration, reloading."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import driftlens as dl
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.architecture import load_architecture
from driftlens.models.heads import LmHead
from driftlens.models.texts import TextSample
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.decoders import EACH_KIND, EACH_LAYOUT, families, in_float64
from tests.zoo.suite import TASKS, spec_of
from tests.zoo.tensors import assert_every_tensor, site_keys, weights_in
from tests.zoo.tokenizers import WORDS, word_tokenizer


def with_shapes(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


LLAMA = pytest.mark.family("Llama")


@pytest.mark.slow
@pytest.mark.shows("attribution", "sites", files="hf-decoder", heads="each model's own", reloads="yes")
@pytest.mark.parametrize("config", families("GPT-2", some=EACH_LAYOUT))
def test_every_tensor_of_a_folder_is_what_merging_and_calibrating_made_of_it(config: Any, tmp_path: Path) -> None:
    """The head too, which is merged and no site; hf-auto takes no model without it. And transformers answers alike."""
    few = {"compute": {"dtype": "float64"}, "metrics": {"jacobian": {"nodes": 8, "samples": 2}}}
    spec = spec_of(config, tmp_path) | few
    spec["architecture"]["loader"] = "hf-auto"
    spec["data"]["defaults"] |= {"n": 12, "n_diagnosis": 6}
    dl.merge(spec, out=tmp_path / "merged", method="task_arithmetic", parameters={"scaling": 0.3})
    folders = tmp_path / "base", [tmp_path / task for task in TASKS]
    buffers, weights = with_shapes(config).named_buffers(), with_shapes(config).named_parameters()
    kept = {name.rpartition(".")[2] for name, _ in buffers} - {name.rpartition(".")[2] for name, _ in weights}
    alike = 1 + sum(key.rpartition(".")[2] in kept for key in weights_in(tmp_path / "base"))
    assert_every_tensor(*folders, tmp_path / "merged", scaling=0.3, shared=alike)
    undifferentiable = config.model_type == "bloom"
    run = dl.analyze(spec, out=tmp_path / "run")
    told = [text for text in run.manifest.notices if "can't be differentiated" in text]
    assert len(told) == undifferentiable
    layers = run.layers(variant="merged")
    assert layers["closure_error"].max() < 1e-9
    # Where random norms read features near zero, or a ReLU has its kinks, a path bends more than its nodes follow.
    assert undifferentiable or layers["jacobian_error"].median() < 1e-2
    assert layers["final_share"].isna().all() == undifferentiable and layers["prefix_share"].notna().all()
    run = run.calibrate(dl.FeatCal(lam=1e-3, rho=1), name="small", save_weights=tmp_path / "out")
    known, stored = load_architecture("hf-decoder", str(tmp_path / "base")), open_checkpoint(tmp_path / "out")
    assert known.lm is not None and known.layout is not None and known.preprocess is not None
    solved = site_keys(known, tmp_path / "base")
    assert_every_tensor(*folders, tmp_path / "out", scaling=0.3, solved=solved, shared=alike)
    merged = weights_in(tmp_path / "merged")
    others = {key for key, value in weights_in(tmp_path / "out").items() if not torch.equal(value, merged[key])}
    assert others <= solved.keys()
    # The library's features and scores of the folder are those that were measured of it.
    model = in_float64(tmp_path / "out")
    rows = [json.loads(line)["input"] for line in (tmp_path / "b-test.jsonl").read_text().splitlines()]
    read: list[Any] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0][:, -1]))
    with torch.no_grad():
        logits = [
            model(**known.preprocess([TextSample(row)]), logits_to_keep=1).logits[:, -1].double() for row in rows
        ]
    measured = torch.tensor(run.features("b", "calibrated:small", layer="final")).double()  # kept in float16
    features = torch.cat(read)
    assert torch.cdist(measured, features).min(dim=1).values.max() < 1e-3 * features.norm(dim=1).max()
    source = known.align(stored)
    head = LmHead(tuple(map(str, range(40))), source, known.lm)
    torch.testing.assert_close(head.scores(features).double(), torch.cat(logits), rtol=1e-6, atol=1e-6)


@pytest.mark.shows("live")
@pytest.mark.parametrize("config", families("GPT-2", some=EACH_KIND + EACH_LAYOUT))
def test_live_models_answer_as_their_own_library_lets_them(config: Any, tmp_path: Path) -> None:
    base = perturbed(with_seed(lambda: transformers.AutoModelForCausalLM.from_config(config))(), 0, 0.2).eval()
    merged, expert = (perturbed(base, seed, 0.2) for seed in (1, 2))
    words, tokenizer = ("red", "green", "blue"), word_tokenizer()
    asked = [" ".join(some) for some in itertools.permutations(WORDS[:5], 2)]
    rows = [(question, words[at % 3]) for at, question in enumerate(asked)]
    run = dl.analyze(
        merged=merged,
        experts={"a": expert},
        data={"a": rows},
        texts={"a": {"classes": list(words)}},
        tokenizer=tokenizer,
        out=tmp_path / "run",
        jacobian=None,
        progress="none",
    )
    assert run.layers()["closure_error"].max() < 1e-3  # in float32
    answers = [tokenizer(f": {word}", add_special_tokens=False)["input_ids"][-1] for word in words]
    for variant, model in (("merged", merged), ("expert", expert)):
        with torch.no_grad():
            scores = [model(**tokenizer(text, return_tensors="pt")).logits[0, -1, answers] for text, _ in rows]
        right = [words[int(score.argmax())] == word for score, (_, word) in zip(scores, rows, strict=True)]
        assert run.accuracy(variant=variant)["value"].tolist() == pytest.approx([np.mean(right)]), variant
