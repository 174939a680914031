"""Vision-language models from files to a saved folder, on questions in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import driftlens as dl
from driftlens.base.errors import IncompatibleModelsError
from driftlens.models.architecture import load_architecture
from tests.zoo.cases import perturbed
from tests.zoo.tensors import assert_every_tensor, site_keys, weights_in
from tests.zoo.vlms import TASKS, saved_vlms, text_spec, vlms


def logits(folder: Path, text: str) -> torch.Tensor:
    """What transformers makes of a text by a folder."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(**transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")).logits


@pytest.mark.shows("drift", "sites", files="hf-vlm", heads="each model's own", reloads="yes")
@pytest.mark.parametrize("name", vlms("LLaVA", "Gemma 3 with images"))
def test_of_texts_every_tensor_is_what_merging_and_calibrating_made_of_it(name: str, tmp_path: Path) -> None:
    saved_vlms(name, tmp_path)
    spec = text_spec(tmp_path)
    run = dl.analyze(spec, out=tmp_path / "run")
    assert run.layers(variant="merged")["closure_error"].max() < 1e-9
    assert any("vision tower saw nothing and stays as merged" in notice for notice in run.manifest.notices)
    run.calibrate(dl.FeatCal(lam=1e-3, rho=1), name="small", save_weights=tmp_path / "out")
    known = load_architecture("hf-vlm", str(tmp_path / "base"))
    solved = site_keys(known, tmp_path / "base")
    assert solved and not any("vision" in key or "visual" in key for key in solved)
    assert_every_tensor(
        tmp_path / "base", [tmp_path / task for task in TASKS], tmp_path / "out", scaling=0.3, solved=solved
    )
    assert torch.isfinite(logits(tmp_path / "out", "is it red")).all()


@pytest.mark.parametrize("loader", ["hf-vlm", "hf-auto"])
def test_a_language_model_is_an_expert_of_the_decoder(loader: str, tmp_path: Path) -> None:
    """Its tensors by another library's names, and the base's own tower."""
    saved_vlms("LLaVA", tmp_path)
    whole = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    alone = transformers.LlamaForCausalLM(whole.config.text_config)
    decoder = {f"model.{key}": value for key, value in whole.model.language_model.state_dict().items()}
    alone.load_state_dict(decoder | {"lm_head.weight": whole.lm_head.weight})
    perturbed(alone, 5, 0.1).save_pretrained(tmp_path / "a")
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
    with pytest.raises(IncompatibleModelsError, match="a language model alone"):
        dl.merge(spec, out=tmp_path / "none", method="task_arithmetic", parameters={"scaling": 0.3})
    assert not (tmp_path / "none").exists()
