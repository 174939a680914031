"""Doubts about what comes with the weights: text towers, tokenizers, the base that adapters name, code beside them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.config.spec import load_spec
from driftlens.experiment.sanity_checks import Finding, check_model_files, check_weights
from driftlens.experiment.study_loading import open_models
from driftlens.pipelines.validate import PreflightReport
from tests.pipelines.checking import check, found, notices, saved, visual, with_expert
from tests.zoo.towers import hf_folder
from tests.zoo.world import Weights, World, merged_weights, moved

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole CLIP of transformers, tokenizer included."""
    return hf_folder(tmp_path_factory.mktemp("models") / "base")


def spec_of(world: World, base: Path, expert: Path) -> dict[str, Any]:
    """A spec of one expert of a whole CLIP of transformers, with prompts for a head."""
    return world.one_task(
        "hf",
        architecture={"loader": "hf-clip", "source": str(base)},
        base={"weights": str(base)},
        experts={"flowers": {"weights": str(expert)}},
        heads={"flowers": {"templates": ["a {}."]}},
    )


def doubts(world: World, base: Path, expert: Path) -> list[Finding]:
    return check_model_files(open_models(load_spec(spec_of(world, base, expert))))


def fine_tuned(base: Path, folder: Path, parts: tuple[str, ...]) -> Path:
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
        (("vision_model.", "logit_scale"), "its own logit scale"),
    ],
    ids=["none", "text_tower", "logit_scale"],
)
def test_a_text_tower_that_will_not_be_used_is_named(
    world: World, base: Path, tmp_path: Path, parts: tuple[str, ...], what: str
) -> None:
    result = check(spec_of(world, base, fine_tuned(base, tmp_path / "expert", parts)))
    assert result.exit_code == 0, result.text()
    told = [finding.text for finding in notices(result) if "not used" in finding.text]
    assert [what in text for text in told] == [True] * bool(what)


def adapters(base: Path, folder: Path, **options: Any) -> Path:
    """LoRA adapters of the image tower's attention, saved by peft; the text tower's are called alike."""
    from peft import LoraConfig, get_peft_model
    from transformers import CLIPModel

    targets = r"vision_model\..*\.(q_proj|v_proj)"
    model = get_peft_model(CLIPModel.from_pretrained(str(base)), LoraConfig(r=2, target_modules=targets, **options))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


def test_adapters_name_their_base(world: World, base: Path, tmp_path: Path) -> None:
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


def edited(file: str, change: Callable[[Any], Any]) -> Change:
    def edit(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return edit


def saved_again(folder: Path) -> None:
    """By the library itself, which writes its own files."""
    from transformers import CLIPTokenizer

    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)


def same_as_older_versions_wrote_it(folder: Path) -> None:
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
    world: World, base: Path, tmp_path: Path, change: Change, told: str | None
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


def test_code_beside_a_model_is_named_and_not_run(world: World, base: Path, tmp_path: Path) -> None:
    expert = tmp_path / "expert"
    shutil.copytree(base, expert)
    canary = tmp_path / "canary"
    (expert / "modeling_x.py").write_text(f"open({str(canary)!r}, 'w')")
    edited("config.json", lambda stated: {**stated, "auto_map": {"AutoModel": "modeling_x.X"}})(expert)
    (told,) = doubts(world, base, expert)
    assert told.level == "notice"
    assert "modeling_x.X" in told.text
    assert not canary.exists()


def test_an_expert_with_the_bases_weights(world: World, tmp_path: Path) -> None:
    result = check(with_expert(world, {"weights": str(world.weights("base"))}))
    notice = found(result, "notice", "expert of flowers")
    assert notice.text == "the expert of flowers has the same weights as the base"
    assert "not fine-tuned" in notice.hint
    assert result.exit_code == 0


def test_equal_up_to_rounding_counts_one_changed_weight_does_not(world: World, tmp_path: Path) -> None:
    rounded = saved(visual(world.state("base"), Tensor.half), tmp_path / "half.safetensors")
    told = [finding.text for finding in notices(check(with_expert(world, rounded)))]
    assert [sum(text in line for line in told) for text in ("same weights", "100.0 % of the entries")] == [
        1,
        1,
    ]
    nearly = world.state("base")
    nearly["visual.proj"][-1, -1] += 0.1  # the very last parameter that is read
    result = check(with_expert(world, saved(nearly, tmp_path / "nearly.safetensors")))
    assert [finding.subject for finding in notices(result)] == ["expert of shapes"]  # many times longer


def test_an_expert_of_another_base_is_at_the_distance_of_unrelated_weights(world: World, tmp_path: Path) -> None:
    foreign = visual(world.state("flowers"), lambda value: value.flip(0))
    result = check(with_expert(world, saved(foreign, tmp_path / "x.safetensors")))
    notice = found(result, "notice", "expert of flowers")
    distance = float(notice.text.split("relative distance ")[1].split()[0])
    assert distance == pytest.approx(math.sqrt(2), abs=0.15)
    assert "another base" in notice.hint
    assert result.exit_code == 0


def test_of_large_models_a_bounded_part_is_read(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = saved(visual(world.state("base"), lambda value: 1.25 * value), tmp_path / "x.safetensors")
    models = open_models(load_spec(world.one_task(experts={"flowers": scaled})))
    read: list[int] = []

    class Counted:
        def __init__(self, source: StateSource) -> None:
            self.name, self.headers, self._source = source.name, source.headers, source

        def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
            tensor = self._source.read(key, rows)
            read.append(tensor.numel())
            return tensor

    counted = {name: Counted(source) for name, source in models.sources.items()}
    monkeypatch.setattr("driftlens.experiment.sanity_checks.MAX_ELEMENTS_READ", 4000)
    monkeypatch.setattr("driftlens.experiment.sanity_checks.READ_CHUNK", 64)
    (finding,) = check_weights(models.architecture.chain, counted)
    # Every entry is 1.25 times the base's, so that any rows give the distance of the whole.
    assert "have relative distance 0.25 from the base" in finding.text
    assert "at least" in finding.text and "first rows" in finding.text
    widest = 2 * max(torch.Size(header.shape[1:]).numel() for header in models.sources["base"].headers.values())
    assert sum(read) <= 4000 + len(read) * widest
    assert sum(read) < 2 * sum(torch.Size(h.shape).numel() for h in models.sources["base"].headers.values()) / 3


def check_merged(world: World, tmp_path: Path, weights: Weights, **changes: Any) -> PreflightReport:
    return check(world.spec(merge=None, merged=saved(weights, tmp_path / "merged.safetensors"), **changes))


def test_task_arithmetic_is_recognised_with_its_coefficient(world: World, tmp_path: Path) -> None:
    finding = found_merge(check_merged(world, tmp_path, merged_weights(world, 0.3)))
    assert finding.level == "ok"
    assert "coefficients 0.30; 0.00 % is left" in finding.text


def test_coefficients_per_task_and_per_matrix_are_recognised(world: World, tmp_path: Path) -> None:
    base, experts = world.state("base"), [world.state(task) for task in world.tasks]

    def merge(coefficients: Callable[[str], tuple[float, float]]) -> Weights:
        return {
            name: start + sum(c * (e[name] - start) for c, e in zip(coefficients(name), experts, strict=True))
            for name, start in base.items()
        }

    finding = found_merge(check_merged(world, tmp_path, merge(lambda _: (0.2, 0.7))))
    assert "coefficients 0.20 to 0.70; 0.00 %" in finding.text
    layerwise = merge(lambda name: (0.1, 0.4) if "mlp" in name else (0.6, 0.3))
    finding = found_merge(check_merged(world, tmp_path, layerwise))
    assert finding.level == "ok"
    assert "coefficients 0.10 to 0.60, others in every tensor" in finding.text


def test_a_merge_of_other_experts_is_doubted(world: World, tmp_path: Path) -> None:
    finding = found_merge(check_merged(world, tmp_path, moved(world.state("base"), 0.03, 9)))
    assert finding.level == "notice"
    share = float(finding.text.split("leave ")[1].split("%")[0])
    assert share == pytest.approx(100, abs=5)  # its noise is orthogonal to both task vectors


def found_merge(result: PreflightReport) -> Finding:
    """The finding about what a merged model is made of."""
    matching = [finding for finding in result.findings if "task vectors" in finding.text]
    assert len(matching) == 1, result.text()
    return matching[0]
