"""The checklist of a merge: each check has a planted fault and a clean twin."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.lora import LoraSource
from driftlens.checkpoints.tensor_sources import StateSource
from driftlens.experiment.checklist import check_merge_files
from driftlens.utils.errors import CheckpointError

CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "num_attention_heads": 2}
CONFIG |= {"hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 2}
LAYERS, WIDTH, ROWS, SCALING = 3, 16, 40, 0.4
Tensors = Mapping[str, Tensor]


def weights(seed: int, scale: float) -> Tensors:
    numbers = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (WIDTH, WIDTH)
    return {key: scale * torch.randn(shape, generator=numbers) for key, shape in shapes.items()}


@dataclass
class Models:
    """Weights, configurations and end tokens of base, two experts and their merge; faults are planted in them."""

    tensors: Mapping[str, Tensors]
    configs: Mapping[str, Mapping[str, object]]
    ends: Mapping[str, str]

    def save(self, root: Path) -> tuple[str, dict[str, str], str]:
        for name, tensors in self.tensors.items():
            (root / name).mkdir()
            save_file(dict(tensors), root / name / "model.safetensors")
            (root / name / "config.json").write_text(json.dumps(self.configs[name]))
            (root / name / "tokenizer_config.json").write_text(json.dumps({"eos_token": self.ends[name]}))
        return str(root / "base"), {task: str(root / task) for task in ("cars", "birds")}, str(root / "merged")


Plant = Callable[[Models], Models]


def models_of(base: Tensors, cars: Tensors, birds: Tensors) -> Models:
    tensors = {
        "base": base,
        "cars": {key: value + cars[key] for key, value in base.items()},
        "birds": {key: value + birds[key] for key, value in base.items()},
        "merged": {key: value + SCALING * (cars[key] + birds[key]) for key, value in base.items()},
    }
    return Models(tensors, dict.fromkeys(tensors, CONFIG), dict.fromkeys(tensors, "</s>"))


BASE, CARS, BIRDS = weights(0, 1.0), weights(1, 0.05), weights(2, 0.05)
CLEAN = models_of(BASE, CARS, BIRDS)
# Of a task vector with a cosine of 0.1 to another one, a merge without it keeps a tenth.
SIMILAR = models_of(BASE, {key: value + 0.1 * BIRDS[key] for key, value in CARS.items()}, BIRDS)


def config(name: str, **settings: object) -> Models:
    return replace(CLEAN, configs={**CLEAN.configs, name: {**CONFIG, **settings}})


def merged(change: Callable[[str, Tensor], Tensor]) -> Models:
    tensors = {key: change(key, value) for key, value in CLEAN.tensors["merged"].items()}
    return replace(CLEAN, tensors={**CLEAN.tensors, "merged": tensors})


def cars(change: Callable[[str, Tensor], Tensor]) -> Models:
    return models_of(BASE, {key: change(key, value) for key, value in CARS.items()}, BIRDS)


def with_head() -> Models:
    tensors = {**CLEAN.tensors["merged"], "lm_head.weight": torch.ones(ROWS, WIDTH)}
    return replace(CLEAN, tensors={**CLEAN.tensors, "merged": tensors})


def without(part: str) -> Models:
    tensors = {key: value for key, value in CLEAN.tensors["merged"].items() if part not in key}
    return replace(CLEAN, tensors={**CLEAN.tensors, "merged": tensors})


def of_one_step() -> Models:
    base = {key: value.bfloat16() for key, value in BASE.items()}
    step = {key: (value * 2**-8).bfloat16() for key, value in base.items()}
    return models_of(base, step, {key: -value for key, value in step.items()})


def spoil(_: str, value: Tensor) -> Tensor:
    return torch.where(torch.arange(value.numel()).reshape(value.shape) == 3, torch.nan, value)


FAULTS: dict[str, tuple[Models, str, str]] = {
    "other rotary base": (config("cars", rope_theta=5e5), "configuration", "problem"),
    "other head count": (config("merged", num_attention_heads=4), "configuration", "problem"),
    "quantized": (config("cars", quantization_config={"quant_method": "gptq"}), "expert of cars", "problem"),
    "other end token": (replace(CLEAN, ends={**CLEAN.ends, "birds": "<eos>"}), "tokenizer", "notice"),
    "more rows of the vocabulary": (
        merged(lambda key, value: torch.cat([value, value[:2]]) if "embed" in key else value),
        *("vocabulary", "notice"),
    ),
    "a lost tensor": (without("layers.1.mlp"), "tensors", "problem"),
    "a head beside a tied table": (with_head(), "tied head", "problem"),
    "no head": (config("merged", tie_word_embeddings=False), "tied head", "problem"),
    "one byte per entry": (merged(lambda _, value: value.to(torch.float8_e4m3fn)), "merged model", "problem"),
    "not a number": (merged(spoil), "values", "problem"),
    "a scale too many": (merged(lambda _, value: 50 * value), "values", "problem"),
    "another base": (cars(lambda key, _: weights(9, 1.0)[key] - BASE[key]), "expert of cars", "notice"),
    "a long task vector": (cars(lambda _, value: 6 * value), "task vectors", "notice"),
    "nothing learned": (cars(lambda _, value: 0 * value), "task vectors", "problem"),
    "opposed experts": (cars(lambda key, _: -BIRDS[key]), "interference", "notice"),
    "one step of the dtype": (of_one_step(), "rounding", "notice"),
    "a layer that was not merged": (
        merged(lambda key, value: BASE[key] if "layers.2" in key else value),
        *("kept", "notice"),
    ),
    "an expert that was not merged": (merged(lambda key, _: BASE[key] + SCALING * BIRDS[key]), "kept", "problem"),
    "an expert that was not merged, like another one": (
        replace(
            SIMILAR, tensors={**SIMILAR.tensors, "merged": {key: BASE[key] + SCALING * BIRDS[key] for key in BASE}}
        ),
        *("kept", "problem"),
    ),
    "no combination of experts": (merged(lambda key, value: value + weights(7, 0.2)[key]), "merged model", "notice"),
}


class CountingSource:
    """Counts the entries read by tensor, and the bytes of all pieces that are still in memory."""

    held, peak = 0, 0

    def __init__(self, source: StateSource) -> None:
        self.name, self.headers, self._source = source.name, source.headers, source
        self.entries: Counter[str] = Counter()

    def read(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        values = self._source.read(key, rows).numpy().copy()
        self.entries[key] += values.size
        CountingSource.held += values.nbytes
        CountingSource.peak = max(CountingSource.peak, CountingSource.held)
        # The tensor and all its views keep the array.
        weakref.finalize(values, self.release, values.nbytes)
        return torch.from_numpy(values)

    @staticmethod
    def release(size: int) -> None:
        CountingSource.held -= size


def test_a_clean_merge_passes_every_check(tmp_path: Path) -> None:
    checklist = check_merge_files(*CLEAN.save(tmp_path))
    assert not checklist.has_doubts, checklist.text()
    checked = {subject for _, subject, _ in FAULTS.values()} - {"expert of cars", "vocabulary"}
    assert {found.subject for found in checklist.findings} >= checked
    assert checklist.kept["cars"]["all layers"] == pytest.approx(SCALING, abs=0.05)
    assert checklist.text().count("✓") == len(checklist.findings)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_under_its_name(name: str, tmp_path: Path) -> None:
    models, subject, level = FAULTS[name]
    findings = check_merge_files(*models.save(tmp_path)).findings
    assert (subject, level) in {(found.subject, found.level) for found in findings}, findings
    assert all(found.hint for found in findings if found.level != "ok")


def test_wrappers_before_names_are_no_other_architecture(tmp_path: Path) -> None:
    wrapped = {f"model.language_{key}": value for key, value in CLEAN.tensors["merged"].items()}
    models = replace(CLEAN, tensors={**CLEAN.tensors, "merged": wrapped})
    assert not check_merge_files(*models.save(tmp_path)).has_doubts


def test_another_family_is_named_and_the_other_models_are_checked(tmp_path: Path) -> None:
    foreign = {key.replace("model.layers", "encoder.block"): value for key, value in CLEAN.tensors["merged"].items()}
    models = replace(CLEAN, tensors={**CLEAN.tensors, "merged": foreign})
    findings = check_merge_files(*models.save(tmp_path)).findings
    doubted = {found.subject: found.hint for found in findings if found.level != "ok"}
    assert "another architecture" in doubted["merged model"] and set(doubted) == {"merged model"}


def write_adapter(folder: Path, scales: Mapping[int, float], trained_on: str = "") -> str:
    """Adapters of the queries of some layers: layer -> scale of its change."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": trained_on}))
    modules = {f"base_model.model.model.layers.{layer}.self_attn.q_proj": scale for layer, scale in scales.items()}
    tensors = {f"{module}.lora_A.weight": torch.full((2, WIDTH), 0.1) for module in modules}
    tensors |= {f"{module}.lora_B.weight": torch.full((WIDTH, 2), scale) for module, scale in modules.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({0: 0.1, 1: 0.2, 2: 0.1}, {"all 3 LoRA modules of the expert of cars change weights": "ok"}),
        ({0: 0.0, 1: 0.1, 2: 0.2}, {"1 of 3 LoRA modules": "notice"}),
        ({0: 0.1, 2: 0.2}, {"1 of 3 modules that the expert of cars targets": "notice", "all 2 LoRA modules": "ok"}),
    ],
    ids=["clean", "dead", "lost"],
)
def test_modules_of_an_adapter_that_are_lost_or_change_nothing_are_counted(
    scales: Mapping[int, float], expected: Mapping[str, str], tmp_path: Path
) -> None:
    base, experts, _ = CLEAN.save(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", scales)
    findings = check_merge_files(base, {"cars": adapter, "birds": experts["birds"]}).findings
    found = [found for found in findings if found.subject == "adapters"]
    assert len(found) == len(expected)
    for finding, (text, level) in zip(found, expected.items(), strict=True):
        assert finding.text.startswith(text) and finding.level == level


def test_adapters_are_read_on_top_of_those_they_were_trained_on(tmp_path: Path) -> None:
    base, _, _ = CLEAN.save(tmp_path)
    lower = write_adapter(tmp_path / "lower", {0: 0.5, 1: 0.5, 2: 0.5}, base)
    places = {
        trained_on: write_adapter(tmp_path / name, {0: 0.1, 1: 0.1, 2: 0.1}, trained_on)
        for name, trained_on in (("upper", lower), ("alone", base))
    }
    findings = check_merge_files(base, {"upper": places[lower], "alone": places[base]}).findings
    (found,) = (found for found in findings if found.subject == "task vectors")
    assert "the expert of upper changes 6 times as much as the expert of alone" in found.text


def test_a_model_given_with_its_adapter_is_checked_like_the_adapter(tmp_path: Path) -> None:
    base, experts, merge = CLEAN.save(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", {0: 0.1, 1: 0.2, 2: 0.1})
    alone, both = (
        check_merge_files(base, {"cars": place, "birds": experts["birds"]}, merge)
        for place in (adapter, f"{base}+{adapter}")
    )
    assert [line for line in both.findings if line.subject != "configuration"] == [
        line for line in alone.findings if line.subject != "configuration"
    ]
    assert both.kept == alone.kept and not {"expert of cars", "tensors"} & {
        line.subject for line in both.findings if line.level != "ok"
    }


def test_every_entry_is_read_once_and_memory_holds_one_layer_of_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, experts, merge = CLEAN.save(tmp_path)
    experts["adapter"] = write_adapter(tmp_path / "adapter", {0: 0.1, 1: 0.2, 2: 0.1})
    sources = list[CountingSource]()

    def open_counting(path: str, *, offline: bool, base: StateSource | None = None) -> StateSource:
        opened = open_checkpoint(path, offline=offline, base=base)
        if isinstance(opened, LoraSource):
            return opened
        sources.append(CountingSource(opened))
        return sources[-1]

    monkeypatch.setattr("driftlens.experiment.study_loading.open_checkpoint", open_counting)
    monkeypatch.setattr("driftlens.experiment.checklist.READ_CHUNK", 4 * WIDTH * WIDTH)
    CountingSource.held = CountingSource.peak = 0
    check_merge_files(base, experts, merge)
    numel = {key: value.numel() for key, value in BASE.items()}
    assert [source.entries for source in sources] == [numel] * 4
    layer = sum(4 * size for key, size in numel.items() if "layers.0." in key)
    assert 0 < CountingSource.peak <= len(sources) * layer


def test_without_a_base_models_are_compared_with_the_first_one(tmp_path: Path) -> None:
    _, experts, merge = CLEAN.save(tmp_path)
    checklist = check_merge_files(None, experts, merge)
    assert not checklist.has_doubts and not checklist.kept


def test_a_base_that_can_not_be_read_is_refused(tmp_path: Path) -> None:
    _, experts, merge = CLEAN.save(tmp_path)
    with pytest.raises(CheckpointError):
        check_merge_files(str(tmp_path / "nowhere"), experts, merge)
