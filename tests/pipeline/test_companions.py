"""Doubts about what comes with the weights: text towers, tokenizers, the base that adapters name, code beside them."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from driftlens.base.access import Context
from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.study.merging import merge_experts
from driftlens.jobs.study.opening import open_models
from driftlens.jobs.study.suspicion import Finding, companions
from driftlens.spec import load_spec
from driftlens.spec.requests import AnalysisRequest
from tests.pipeline.checking import check, found, notices, saved, with_expert
from tests.zoo.towers import hf_folder
from tests.zoo.world import World

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}

Change = Callable[[pathlib.Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A whole CLIP of transformers, tokenizer included."""
    return hf_folder(tmp_path_factory.mktemp("models") / "base")


def spec_of(world: World, base: pathlib.Path, expert: pathlib.Path) -> dict[str, Any]:
    """A spec of one expert of a whole CLIP of transformers, with prompts for a head."""
    return world.one_task(
        "hf",
        architecture={"loader": "hf-clip", "source": str(base)},
        base={"weights": str(base)},
        experts={"flowers": {"weights": str(expert)}},
        heads={"flowers": {"templates": ["a {}."]}},
    )


def doubts(world: World, base: pathlib.Path, expert: pathlib.Path) -> list[Finding]:
    return companions(open_models(load_spec(spec_of(world, base, expert))))


def fine_tuned(base: pathlib.Path, folder: pathlib.Path, parts: tuple[str, ...]) -> pathlib.Path:
    """An expert saved by transformers, whose parameters under these names moved; its processors come along."""
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(parts):
                parameter.add_(0.01)
    shutil.copytree(base, folder)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        (("vision_model.", "visual_projection."), ""),
        (("vision_model.", "text_model.", "text_projection."), "a fine-tuned text tower"),
        (("vision_model.", "logit_scale"), "a logit scale of its own"),
    ],
    ids=["none", "text_tower", "logit_scale"],
)
def test_a_text_tower_that_will_not_be_used_is_named(
    world: World, base: pathlib.Path, tmp_path: pathlib.Path, parts: tuple[str, ...], what: str
) -> None:
    result = check(spec_of(world, base, fine_tuned(base, tmp_path / "expert", parts)))
    assert result.exit_code == 0, result.text()
    told = [finding.text for finding in notices(result) if "not used" in finding.text]
    assert [what in text for text in told] == [True] * bool(what)


def test_an_analysis_says_so_too_of_whole_models_of_open_clip(world: World, tmp_path: pathlib.Path) -> None:
    weights = world.state("flowers")
    weights["transformer.resblocks.0.ln_1.bias"] += 0.01
    spec = with_expert(world, saved(weights, tmp_path / "x.safetensors"), metrics={"jacobian": False})
    told = [
        text
        for text in analyze(spec, AnalysisRequest(out=tmp_path / "run")).manifest.notices
        if "text tower" in text
    ]
    assert [text.partition(",")[0] for text in told] == ["the expert of flowers has a fine-tuned text tower"]


@pytest.mark.parametrize("parts", [("vision_model.",), ("vision_model.", "text_model.")])
def test_the_text_side_of_a_whole_siglip_is_named_and_kept(
    world: World, tmp_path: pathlib.Path, parts: tuple[str, ...]
) -> None:
    """Its image tower alone is merged: what its own text tower learned is named, and saved folders hold the base's."""
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    config = SiglipConfig(
        vision_config={**SIGLIP, "image_size": 16, "patch_size": 8},
        text_config={**SIGLIP, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
    )
    model = SiglipModel(config)
    model.save_pretrained(tmp_path / "base")
    SiglipImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(parts):
                parameter.add_(0.01)
    model.save_pretrained(tmp_path / "expert")
    spec = spec_of(world, tmp_path / "base", tmp_path / "expert")
    spec["architecture"]["loader"] = "hf-vit"
    del spec["heads"]
    models = open_models(load_spec(spec))
    (notice,) = models.architecture.notices
    assert "attention pooling" in notice and "text tower" in notice
    told = [finding.text for finding in companions(models)]
    assert ["a fine-tuned text tower, which is not used: saved" in text for text in told] == [True] * (
        len(parts) - 1
    )
    merge_experts(load_spec(spec), "average", {}, tmp_path / "out", Context())
    merged, info = SiglipModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    base = SiglipModel.from_pretrained(tmp_path / "base").state_dict()
    moved = {
        key.split(".")[0] for key, value in merged.state_dict().items() if not torch.equal(value, base[key])
    }
    assert moved == {"vision_model"}


def adapters(base: pathlib.Path, folder: pathlib.Path, **options: Any) -> pathlib.Path:
    """LoRA adapters of the image tower's attention, saved by peft; the text tower's are called alike."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    targets = r"vision_model\..*\.(q_proj|v_proj)"
    model = get_peft_model(
        CLIPModel.from_pretrained(str(base)), LoraConfig(r=2, target_modules=targets, **options)
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def test_adapters_name_their_base(world: World, base: pathlib.Path, tmp_path: pathlib.Path) -> None:
    own = adapters(base, tmp_path / "own")
    assert doubts(world, base, own) == []
    moved = tmp_path / "elsewhere" / "base"
    shutil.copytree(base, moved)
    assert doubts(world, moved, own) == []  # the same last part
    other = tmp_path / "clip-of-somebody"
    shutil.copytree(base, other)
    notice = found(check(spec_of(world, other, own)), "notice", "expert of flowers")
    assert str(base) in notice.text and str(other) in notice.text
    (other / "config.json").write_text(
        json.dumps({**json.loads((other / "config.json").read_text()), "_name_or_path": "hub/base"})
    )
    assert doubts(world, other, own) == []
    (told,) = doubts(world, base, adapters(base, tmp_path / "pinned", revision="abc123"))
    assert "'abc123'" in told.text


def test_adapters_that_do_not_fit_say_whose_they_are(
    world: World, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    problem = found(
        check(world.one_task("hf", experts={"flowers": {"weights": str(adapters(base, tmp_path / "a"))}})),
        "problem",
        "expert of flowers",
    )
    assert problem.exit_code == 4
    assert str(base) in problem.hint


def edited(file: str, change: Callable[[Any], Any]) -> Change:
    def edit(folder: pathlib.Path) -> None:
        path = folder / file
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit


def saved_again(folder: pathlib.Path) -> None:
    """By the library itself, which writes its own files."""
    from transformers import CLIPTokenizer

    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)


def same_as_older_versions_wrote_it(folder: pathlib.Path) -> None:
    saved_again(folder)

    def older(stated: dict[str, Any]) -> dict[str, Any]:
        model = stated["model"]
        return {
            **stated,
            "padding": None,
            "model": {**model, "merges": [" ".join(m) for m in model["merges"]]},
        }

    edited("tokenizer.json", older)(folder)
    wrapped = lambda stated: {**stated, "eos_token": {"content": stated["eos_token"]}}  # noqa: E731
    edited("tokenizer_config.json", wrapped)(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: None, None),
        (same_as_older_versions_wrote_it, None),
        (edited("vocab.json", lambda ids: {**ids, "a": ids["b"], "b": ids["a"]}), "vocab.json"),
        (edited("tokenizer_config.json", lambda stated: {**stated, "eos_token": "a"}), "eos_token 'a' for"),
        (
            edited("tokenizer.json", lambda s: {**s, "added_tokens": [*s["added_tokens"][1:]]}),
            "tokenizer.json",
        ),
    ],
    ids=["same", "older_files", "swapped_ids", "another_end", "an_added_token_less"],
)
def test_tokenizers_are_compared_by_what_they_do(
    world: World, base: pathlib.Path, tmp_path: pathlib.Path, change: Change, told: str | None
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(base, first)
    saved_again(first)
    shutil.copytree(first, second)
    for folder in (first, second):
        for file in ("vocab.json", "merges.txt"):  # as versions before 5 have them beside tokenizer.json
            shutil.copy(base / file, folder / file)
    change(second)
    texts = [finding.text for finding in doubts(world, first, second)]
    assert len(texts) == (told is not None), texts
    assert told is None or told in texts[0]


def test_code_beside_a_model_is_named_and_not_run(
    world: World, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expert = tmp_path / "expert"
    shutil.copytree(base, expert)
    canary = tmp_path / "canary"
    (expert / "modeling_x.py").write_text(f"open({str(canary)!r}, 'w')")
    edited("config.json", lambda stated: {**stated, "auto_map": {"AutoModel": "modeling_x.X"}})(expert)
    (told,) = doubts(world, base, expert)
    assert told.level == "notice"
    assert "modeling_x.X" in told.text
    assert not canary.exists()
