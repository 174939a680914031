"""Vision-language models from files to a saved folder, on questions in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import driftlens as dl
from driftlens.calibration.residual import ResidualCal
from driftlens.models.architecture import load_architecture
from driftlens.pipelines.evaluation import SPARE_TOKENS
from driftlens.utils.errors import IncompatibleModelsError
from tests.quick import few
from tests.reference import calibration as reference
from tests.zoo.cases import perturbed
from tests.zoo.tensors import assert_every_tensor, site_keys, weights_in
from tests.zoo.vlms import PROCESSORS, TASKS, in_double, model_of, picture_spec, saved_vlms, text_spec, vlms

SEVERAL = ("Idefics 3", "Qwen2.5-VL")
"""Families beside LLaVA whose processors lay several images of a sample out in ways of their own."""


def logits(folder: Path, text: str) -> torch.Tensor:
    """What transformers makes of a text by a folder."""
    model = in_double(transformers.AutoModelForImageTextToText.from_pretrained(folder))
    with torch.no_grad():
        return model(**transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")).logits


def read_by_the_library(processor: Any, question: str, *pictures: Path) -> Any:
    """What a folder's own processor makes of a question about pictures."""
    marks = [{"type": "image"} for _ in pictures]
    said = [{"role": "user", "content": [*marks, {"type": "text", "text": question}]}]
    text = processor.apply_chat_template(said, add_generation_prompt=True)
    return processor(text=[text], images=[[*map(Image.open, pictures)]], return_tensors="pt")


def final_features(folder: Path, questions: list[tuple[str, Path] | tuple[str, Path, Path]]) -> torch.Tensor:
    """What a folder's head reads where its answers to questions about pictures begin, by transformers alone."""
    model = in_double(transformers.AutoModelForImageTextToText.from_pretrained(folder))
    processor = transformers.AutoProcessor.from_pretrained(folder)
    read: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0][:, -1]))
    for question, *pictures in questions:
        given = read_by_the_library(processor, question, *pictures)
        with torch.no_grad():
            model(**{key: x.double() if x.is_floating_point() else x for key, x in given.items()})
    return torch.cat(read)


def alike(name: str) -> int:
    """How many tensors are buffers of numbers, which experts have as the base has them."""
    buffers, saved = dict(model_of(name).named_buffers()), model_of(name).state_dict()
    return sum(key in saved and value.is_floating_point() for key, value in buffers.items())


def fed(model: Any, path: str, given: Any) -> torch.Tensor:
    """What a module is given, row by row, of a question about a picture."""
    read: list[torch.Tensor] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad(), hook:
        model(**{key: x.double() if x.is_floating_point() else x for key, x in given.items()})
    return read[0].flatten(0, -2)


@pytest.mark.shows("drift", "sites", files="hf-vlm", heads="each model's own", reloads="yes")
@pytest.mark.parametrize("name", vlms(some=["LLaVA"]))
def test_of_texts_every_tensor_is_what_merging_and_calibrating_made_of_it(name: str, tmp_path: Path) -> None:
    saved_vlms(name, tmp_path)
    spec = text_spec(tmp_path)
    run = dl.analyze(spec, out=tmp_path / "run")
    assert run.layers(variant="merged")["closure_error"].max() < 1e-9
    assert any("projector did not run and stay as merged" in notice for notice in run.manifest.notices)
    run.calibrate(dl.FeatCal(lam=1e-3, rho=1), name="small", save_weights=tmp_path / "out")
    known = load_architecture("hf-vlm", str(tmp_path / "base"))
    solved = site_keys(known, tmp_path / "base")
    assert solved and not any("vision" in key or "visual" in key for key in solved)
    assert_every_tensor(
        tmp_path / "base",
        [tmp_path / task for task in TASKS],
        tmp_path / "out",
        scaling=0.3,
        solved=solved,
        shared=alike(name),
    )
    assert torch.isfinite(logits(tmp_path / "out", "is it red")).all()


@pytest.mark.shows("drift", "attribution", "sites", files="hf-vlm", heads="each model's own", reloads="yes")
@pytest.mark.parametrize("name", vlms(only=PROCESSORS, some=["Qwen2.5-VL"]))
def test_of_pictures_tower_and_decoder_are_measured_and_repaired(name: str, tmp_path: Path) -> None:
    saved_vlms(name, tmp_path)
    spec = picture_spec(tmp_path, metrics={"jacobian": {"nodes": 8, "samples": 1}})
    run = dl.analyze(spec, out=tmp_path / "run")
    layers = run.layers(variant="merged")
    assert layers["closure_error"].max() < 1e-9 and layers["jacobian_error"].median() < 1e-2
    run = run.calibrate(dl.FeatCal(lam=1e-3, rho=1), name="small", save_weights=tmp_path / "out")
    known = load_architecture("hf-vlm", str(tmp_path / "base"), pictured=True)
    solved = site_keys(known, tmp_path / "base")
    assert {layer.stream for layer in known.chain.layers} == {"vision", "hidden"}
    projector = next(layer for layer in known.chain.layers if (layer.stream, layer.pool) == ("hidden", "mean"))
    between = {f"{projector.path}.{site.name}" for site in projector.sites}
    in_file = {key.removesuffix(".weight") for key in solved}
    assert between and all(any(key.endswith(site.removeprefix("model.")) for key in in_file) for site in between)
    assert any("vi" in key and "weight" in key for key in solved)
    assert_every_tensor(
        tmp_path / "base",
        [tmp_path / task for task in TASKS],
        tmp_path / "out",
        scaling=0.3,
        solved=solved,
        shared=alike(name),
    )
    # What the library and the folder's own processor make of the pictures is what was measured.
    rows = [json.loads(line) for line in (tmp_path / "b-test.jsonl").read_text().splitlines()]
    features = final_features(tmp_path / "out", [(row["input"], tmp_path / row["picture"]) for row in rows])
    measured = torch.tensor(run.features("b", "calibrated:small", layer="final")).double()  # kept in float16
    assert torch.cdist(measured, features).min(dim=1).values.max() < 1e-3 * features.norm(dim=1).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["LLaVA", *SEVERAL], (), some=["Qwen2.5-VL"]))
def test_questions_may_be_about_several_pictures(name: str, tmp_path: Path) -> None:
    saved_vlms(name, tmp_path)
    spec = picture_spec(tmp_path, several=True, metrics={"jacobian": False})
    run = dl.analyze(spec, out=tmp_path / "run")
    assert run.layers(variant="merged")["closure_error"].max() < 1e-9
    rows = [json.loads(line) for line in (tmp_path / "b-test.jsonl").read_text().splitlines()]
    asked: Any = [(row["input"], *(tmp_path / one for one in row["picture"])) for row in rows]
    assert {len(question) for question in asked} == {2, 3}
    features = final_features(tmp_path / "b", asked)
    measured = torch.tensor(run.features("b", "expert", layer="final")).double()  # kept in float16
    assert torch.cdist(measured, features).min(dim=1).values.max() < 1e-3 * features.norm(dim=1).max()


@pytest.mark.slow
@pytest.mark.every
def test_a_projector_is_solved_from_the_features_of_images_alone(tmp_path: Path) -> None:
    """Against FeatCal's equations in loops, on what transformers feeds the projectors of merged model and experts."""
    name, path = "Qwen2.5-VL", "model.visual.merger.mlp.2"
    saved_vlms(name, tmp_path)
    spec = picture_spec(tmp_path, metrics={"jacobian": False})
    dl.merge(spec, out=tmp_path / "merged", method="task_arithmetic", parameters={"scaling": 0.3})
    run = dl.analyze(spec, out=tmp_path / "run")
    run.calibrate(dl.FeatCal(lam=1e-3, rho=1, alpha=0.4), name="p", sites=[path], save_weights=tmp_path / "out")
    models = {
        part: in_double(transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / part))
        for part in ("merged", "out", *TASKS)
    }
    processor, rows = transformers.AutoProcessor.from_pretrained(tmp_path / "base"), {}
    for task in TASKS:
        asked = [json.loads(line) for line in (tmp_path / f"{task}-train.jsonl").read_text().splitlines()]
        given = [read_by_the_library(processor, row["input"], tmp_path / row["picture"]) for row in asked]
        read = [torch.cat([fed(models[part], path, one) for one in given]) for part in ("merged", task)]
        rows[task] = [(1.0, x, e) for x, e in zip(*read, strict=True)]
    parts = {part: model.get_submodule(path) for part, model in models.items()}
    wanted = reference.solved_linear(parts["merged"], None, parts, rows, reference.Settings(1e-3, 1, 0.4))
    for leaf, value in wanted.items():
        torch.testing.assert_close(getattr(parts["out"], leaf), value, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(getattr(parts["merged"], leaf), value, rtol=1e-3)


@pytest.mark.parametrize("name", few(["LLaVA", "Qwen2.5-VL"], (), some=["Qwen2.5-VL"]))
def test_answers_about_pictures_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    """Greedy ones and the likelihood of given ones, one question at a time; calibration shows the expert's own."""
    saved_vlms(name, tmp_path)
    spec = picture_spec(tmp_path)
    for task in TASKS:
        spec["data"][task] |= {
            "classes": False,
            "metric": ["exact_match", "perplexity"],
            "decoder_inputs": "expert",
        }
    run = dl.analyze(spec, out=tmp_path / "run")
    scores = run.scores().query("task == 'b' and variant == 'expert'").set_index(["metric", "sample_id"])
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "b").eval()
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "b")
    tokenizer = processor.tokenizer
    for line, text in enumerate((tmp_path / "b-test.jsonl").read_text().splitlines(), start=1):
        row = json.loads(text)
        given = read_by_the_library(processor, row["input"], tmp_path / row["picture"])
        answer = tokenizer(f":{row['target']}", add_special_tokens=False)["input_ids"][1:]
        new = len(answer) + SPARE_TOKENS
        with torch.no_grad():
            said = model.generate(**given, do_sample=False, max_new_tokens=new)[0, given["input_ids"].shape[1] :]
            longer = {key: value for key, value in given.items() if key != "mm_token_type_ids"}
            longer |= {"input_ids": torch.cat((given["input_ids"], torch.tensor([answer])), dim=1)}
            longer |= {"attention_mask": torch.ones_like(longer["input_ids"])}
            if "mm_token_type_ids" in given:
                zeros = torch.zeros(1, len(answer), dtype=torch.long)
                longer["mm_token_type_ids"] = torch.cat((given["mm_token_type_ids"], zeros), dim=1)
            likely = model(**longer).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
        wanted = tokenizer.decode(said, skip_special_tokens=True).strip()
        assert scores.loc[("exact_match", str(line)), "answer"] == wanted
        loss = -sum(float(likely[at, token]) for at, token in enumerate(answer))
        assert scores.loc[("perplexity", str(line)), "value"] == pytest.approx(loss, rel=1e-3)
    assert len(set(scores.loc["exact_match", "answer"])) > 1
    run.calibrate(dl.FeatCal(lam=1e-3, rho=1), name="small")


def write_decoder_alone(folder: Path, name: str) -> None:
    """A plain language model near the decoder of LLaVA's base."""
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder / "base")
    alone = transformers.LlamaForCausalLM(whole.config.text_config)
    decoder = {f"model.{key}": value for key, value in whole.model.language_model.state_dict().items()}
    alone.load_state_dict(decoder | {"lm_head.weight": whole.lm_head.weight})
    perturbed(alone, 5, 0.1).save_pretrained(folder / name)


@pytest.mark.parametrize("loader", few(["hf-vlm", "hf-auto"], ["hf-auto"]))
def test_a_language_model_is_an_expert_of_the_decoder(loader: str, tmp_path: Path) -> None:
    """Its tensors by another library's names, and the base's own tower."""
    saved_vlms("LLaVA", tmp_path)
    write_decoder_alone(tmp_path, "a")
    spec: Any = text_spec(tmp_path)
    spec["architecture"]["loader"] = loader
    dl.merge(spec, out=tmp_path / "out", method="task_arithmetic", parameters={"scaling": 0.3})
    before, after = weights_in(tmp_path / "base"), weights_in(tmp_path / "out")
    a, b = weights_in(tmp_path / "a"), weights_in(tmp_path / "b")
    for key, value in before.items():
        plain = key.replace("language_model.lm_head", "lm_head").replace("language_model.model", "model")
        change = (a[plain] - value if plain in a else 0) + b[key] - value
        torch.testing.assert_close(after[key], value + 0.3 * change)
    spec["base"]["weights"] = str(tmp_path / "a")
    with pytest.raises(IncompatibleModelsError, match="a language model without vision tower"):
        dl.merge(spec, out=tmp_path / "none", method="task_arithmetic", parameters={"scaling": 0.3})
    assert not (tmp_path / "none").exists()


def mixed_spec(folder: Path, **more: Any) -> Any:
    """Task a asks about pictures, task b in words."""
    spec = picture_spec(folder, metrics={"jacobian": False}, **more)
    del spec["data"]["b"]["image"]
    return spec


@pytest.mark.parametrize("name", few(["Gemma 4 with images", "Qwen3-VL"], (), some=()))
def test_of_each_task_a_run_of_both_measures_what_one_of_it_alone_does(name: str, tmp_path: Path) -> None:
    """Keys and values that wait, deepstack in a packed tower; towers are solved as if the other task weren't there."""
    saved_vlms(name, tmp_path)
    spec = mixed_spec(tmp_path)
    dl.merge(spec, out=tmp_path / "merged", method="task_arithmetic", parameters={"scaling": 0.3})
    spec = spec | {"merged": {"weights": str(tmp_path / "merged")}}
    del spec["merge"]
    with_shares = spec | {"metrics": {"jacobian": {"nodes": 8, "samples": 1}}}
    run = dl.analyze(with_shares, out=tmp_path / "run", progress="none")
    shares = run.layers(variant="merged").groupby("task")[["final_share", "remainder_share"]].sum()
    assert shares.sum(axis=1).to_list() == pytest.approx([1, 1], abs=1e-6)
    alone = {}
    for task in TASKS:
        of_task = spec | {"experts": {task: spec["experts"][task]}}
        of_task["data"] = {key: spec["data"][key] for key in (task, "defaults")}
        alone[task] = dl.analyze(of_task, out=tmp_path / f"run-{task}", progress="none")
        for variant in ("merged", "expert"):
            both = (one.features(task, variant, layer="final") for one in (run, alone[task]))
            np.testing.assert_allclose(*both, rtol=2e-3, atol=2e-3)  # kept in float16
    for method, calibrator in {"featcal": dl.FeatCal(), "residual": ResidualCal(folds=2)}.items():
        for tasks, of in (("ab", run), ("a", alone["a"])):
            folder = tmp_path / f"{method}-{tasks}"
            of.calibrate(calibrator, name=method, save_weights=folder, attribution=False)
        mixed, pictures = (weights_in(tmp_path / f"{method}-{tasks}") for tasks in ("ab", "a"))
        of_tower = [key for key in mixed if "vi" in key and "language_model" not in key]
        before = weights_in(tmp_path / "merged")
        assert of_tower and any(not torch.equal(mixed[key], before[key]) for key in of_tower)
        for key in of_tower:
            torch.testing.assert_close(mixed[key], pictures[key], rtol=1e-5, atol=1e-6)
        assert any(not torch.equal(mixed[key], pictures[key]) for key in mixed.keys() - {*of_tower})
    assert torch.isfinite(logits(tmp_path / "featcal-ab", "is it red")).all()


@pytest.mark.parametrize("name", few(PROCESSORS, (), some=()))
def test_no_number_depends_on_batches_or_on_the_order_of_samples(name: str, tmp_path: Path) -> None:
    saved_vlms(name, tmp_path)
    spec, tables = mixed_spec(tmp_path), []
    for turn, size in enumerate((4, 1)):
        spec["data"]["defaults"] |= {"batch_size": size, "n_diagnosis": 8}
        for file in tmp_path.glob("*.jsonl") if turn else ():
            file.write_text("\n".join(reversed(file.read_text().splitlines())))
        run = dl.analyze(spec, out=tmp_path / f"run-{turn}", progress="none")
        run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / f"out-{turn}")
        tables.append((run.layers().select_dtypes("number"), weights_in(tmp_path / f"out-{turn}")))
    for table, weights in tables[1:]:
        columns = ["drift_l2_mean", "drift_rel", "mismatch_l2_mean", "cos_mean"]
        np.testing.assert_allclose(table[columns], tables[0][0][columns], rtol=1e-6, atol=1e-9)
        for key, value in weights.items():
            torch.testing.assert_close(value, tables[0][1][key], rtol=1e-5, atol=1e-6)
