"""LoRA adapters: what is read is what peft itself merges."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.lora import LoraSource
from driftlens.checkpoints.tensor_sources import InMemorySource, StateSource, module_source, rename_keys
from driftlens.utils.errors import CheckpointError
from tests.models.writing import train
from tests.refusing import refusing
from tests.zoo.cases import with_seed
from tests.zoo.small import small

# peft 0.21 asks transformers 5 for an attribute that this has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def clip() -> nn.Module:
    """A tiny CLIP image tower of transformers."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "image_size": 8, "patch_size": 4}
    return with_seed(lambda: small("CLIPVisionModel", **sizes))().eval()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "rank_stabilised": {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["fc1", "out_proj"]},
    "trained_whole": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["fc2"]},
    "dora": {"r": 2, "lora_alpha": 6, "use_dora": True, "target_modules": ["q_proj", "fc2"]},
    "excluded": {"r": 2, "target_modules": ["q_proj", "v_proj", "fc1"], "exclude_modules": ["fc1"]},
    "some_layers": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "own_biases": {"r": 2, "target_modules": ["q_proj"], "bias": "lora_only"},
    "all_biases": {"r": 2, "target_modules": ["q_proj"], "bias": "all"},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "k_proj", "fc2"],
        "rank_pattern": {"k_proj": 4, r"layers.1.*.q_proj": 1},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 7, "fc2": 1},
    },
}


@pytest.fixture
def base() -> StateSource:
    return module_source(clip(), "base")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_merged_weights_are_those_of_peft(options: dict[str, Any], base: StateSource, tmp_path: Path) -> None:
    expected = train(clip(), tmp_path, **options)
    merged = LoraSource(base, tmp_path)
    merged.require_complete(clip())
    assert merged.headers == base.headers
    changed = {key for key in base.headers if not torch.equal(base.read(key), expected[key])}
    # In both blocks: a weight of every adapted module, weight and bias of those that were trained whole.
    modules = len(options["target_modules"]) - len(options.get("exclude_modules", ()))
    weights = len(options.get("layers_to_transform", (0, 1))) * modules
    biases = {"all": sum(key.endswith("bias") for key in base.headers), "lora_only": weights}
    whole = 4 * len(options.get("modules_to_save", ()))
    assert len(changed) == weights + whole + biases.get(options.get("bias", ""), 0)
    for key in base.headers:
        torch.testing.assert_close(merged.read(key), expected[key], rtol=0, atol=0 if key not in changed else 1e-6)


@pytest.mark.parametrize("kind", ["plain", "dora"])
def test_rows_are_rows_of_the_merged_weight(kind: str, base: StateSource, tmp_path: Path) -> None:
    train(clip(), tmp_path, **OPTIONS[kind])
    merged = LoraSource(base, tmp_path)
    key = next(key for key in base.headers if key.endswith("layers.1.self_attn.q_proj.weight"))
    torch.testing.assert_close(merged.read(key, (2, 5)), merged.read(key)[2:5], rtol=0, atol=1e-6)


class Transposed(nn.Module):
    """A model whose linear maps store [in, out], as GPT-2's do."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.c_attn = Conv1D(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_attn(x)


class Embedded(nn.Module):
    """A model of a table of embeddings, whose adapter's A is of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", [Transposed, Embedded])
def test_weights_stored_in_by_out_are_updated_in_that_layout(
    kind: type[nn.Module], use_dora: bool, tmp_path: Path
) -> None:
    module = kind()
    base = InMemorySource("base", {key: value.clone() for key, value in module.state_dict().items()})
    options = {"fan_in_fan_out": True} if kind is Transposed else {}
    [name] = [name for name, _ in module.named_children()]
    expected = train(module, tmp_path, r=2, target_modules=[name], use_dora=use_dora, **options)
    key = f"{name}.weight"
    merged = LoraSource(base, tmp_path)
    torch.testing.assert_close(merged.read(key), expected[key], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged.read(key, (1, 3)), expected[key][1:3], rtol=1e-6, atol=1e-6)


def test_adapters_find_their_weights_with_and_without_a_wrapper(base: StateSource, tmp_path: Path) -> None:
    expected = train(clip(), tmp_path, **OPTIONS["plain"])
    key = next(key for key in base.headers if key.endswith("layers.0.self_attn.v_proj.weight"))
    wrapped = rename_keys(base, {f"model.vision_model.{name}": name for name in base.headers})
    bare = rename_keys(base, {name.partition(".")[2] or name: name for name in base.headers})
    for view, name in ((wrapped, f"model.vision_model.{key}"), (bare, key.partition(".")[2])):
        torch.testing.assert_close(LoraSource(view, tmp_path).read(name), expected[key], rtol=0, atol=1e-6)


def test_two_towers_are_told_apart_by_shape_or_refused(base: StateSource, tmp_path: Path) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    image = {f"image.{key}": base.read(key) for key in base.headers}
    narrow = {f"text.{key}": torch.zeros(3, 3) for key in base.headers}
    same = {f"text.{key}": base.read(key) for key in base.headers}
    merged = LoraSource(InMemorySource("both", image | narrow), tmp_path)
    changed = {key for key in merged.headers if not torch.equal(merged.read(key), (image | narrow)[key])}
    assert len(changed) == 4 and all(key.startswith("image.") for key in changed)
    with pytest.raises(CheckpointError, match=r"fits several weights: image.*, text"):
        LoraSource(InMemorySource("both", image | same), tmp_path)


def test_on_a_base_in_half_precision_the_sum_is_not_rounded(base: StateSource, tmp_path: Path) -> None:
    expected = train(clip(), tmp_path, **OPTIONS["plain"])
    half = InMemorySource("half", {key: base.read(key).bfloat16() for key in base.headers})
    key = next(key for key in base.headers if key.endswith("layers.0.self_attn.v_proj.weight"))
    exact = half.read(key).float() + (expected[key] - base.read(key))
    adapted = LoraSource(half, tmp_path)
    torch.testing.assert_close(adapted.read(key), exact, rtol=1e-6, atol=1e-7)
    assert adapted.headers[key].dtype == torch.float32
    untouched = next(key for key in base.headers if torch.equal(expected[key], base.read(key)))
    assert adapted.headers[untouched].dtype == torch.bfloat16


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def edit_weights(
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(dict(change(load_file(path))), path)

    return edit


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit_config(use_qalora=True), "use_qalora is True"),
        (edit_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (edit_config(target_parameters=["fc1.weight"]), "target_parameters is"),
        (edit_config(peft_type="IA3"), "unsupported peft_type, expected LORA"),
    ],
    ids=["qalora", "pissa", "parameters", "other_method"],
)
def test_what_is_more_than_lora_is_refused_with_the_remedy(
    spoil: Callable[[Path], None], message: str, base: StateSource, tmp_path: Path
) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    spoil(tmp_path)
    with refusing(CheckpointError, match=message, hint="merge_and_unload"):
        LoraSource(base, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank_pattern": {"((": 3}}, "has an invalid pattern"),
        ({"rank_pattern": {"fc2": None}}, r"rank_pattern\.fc2: Input should be a valid number"),
        ({"r": math.inf}, "r: Input should be a finite number"),
        ({"lora_alpha": 10**400}, "lora_alpha: "),
        ({"modules_to_save": [5]}, r"modules_to_save\.0: Input should be a valid string"),
    ],
)
def test_a_configuration_that_is_none_is_refused(
    changes: dict[str, Any], message: str, base: StateSource, tmp_path: Path
) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    edit_config(**changes)(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        LoraSource(base, tmp_path)


def of_rank_zero(folder: Path) -> None:
    edit_config(r=0)(folder)
    edit_weights(lambda w: {k: v[:0] if "lora_A" in k else v[:, :0] for k, v in w.items()})(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_rank_zero, "has rank 0 in the weights and 0 in"),
        (
            edit_config(r=5),
            r"has rank 2 in the weights and 5 in adapter_config.json",
        ),
        (
            edit_weights(lambda w: {k: v for k, v in w.items() if "lora_B" in k}),
            "has lora_B, expected lora_A and lora_B",
        ),
        (edit_config(use_dora=True), "expected lora_A and lora_B and lora_magnitude_vector"),
        (edit_weights(lambda w: w | {"x.lora_magnitude": torch.zeros(2)}), "'x.lora_magnitude' is not A"),
        (
            edit_weights(lambda w: w | {"x.weight": torch.zeros(2)}),
            "'x.weight' is neither an adapter nor a weight",
        ),
        (edit_config(bias="all"), "bias is 'all', but '.*bias' was not saved"),
        (
            lambda folder: (folder / "adapter_model.safetensors").unlink(),
            "adapter_model.safetensors is missing",
        ),
        (
            lambda folder: (folder / "adapter_config.json").write_text("{"),
            "adapter_config.json can't be read",
        ),
    ],
    ids=[
        *(
            "rank_zero",
            "wrong_rank",
            "half_missing",
            "no_lengths",
            "magnitude",
            "stranger",
            "biases",
            "no_weights",
            "no_config",
        )
    ],
)
def test_a_damaged_adapter_is_refused(
    spoil: Callable[[Path], object], message: str, base: StateSource, tmp_path: Path
) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    spoil(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        LoraSource(base, tmp_path)


LOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rank": (OPTIONS["plain"], {"r": 5}),
    "rank of a kind": ({**OPTIONS["plain"], "rank_pattern": {"v_proj": 3}}, {"rank_pattern": {}}),
    "ranks of two kinds": (
        {
            **OPTIONS["plain"],
            "r": 4,
            "target_modules": ["q_proj", "v_proj", "fc1"],
            "rank_pattern": {"v_proj": 3, "fc1": 1},
        },
        {"rank_pattern": None},
    ),
    "rank of one module": (
        {**OPTIONS["plain"], "rank_pattern": {"layers.1.*q_proj": 1}},
        {"rank_pattern": {}},
    ),
    "another rank": ({**OPTIONS["plain"], "rank_pattern": {"v_proj": 3}}, {"rank_pattern": {"v_proj": 6}}),
    "dora": (OPTIONS["dora"], {"use_dora": False}),
    "module": (OPTIONS["plain"], {"target_modules": ["q_proj"]}),
    "excluded": (OPTIONS["plain"], {"exclude_modules": ["q_proj", "fc2"]}),
    "saved whole": (OPTIONS["plain"], {"modules_to_save": ["v_proj"]}),
    "excluded by a pattern": (OPTIONS["plain"], {"exclude_modules": r".*\.q_proj"}),
    "pattern": (OPTIONS["plain"], {"target_modules": r"vision.*\.q_proj|q_proj|v_proj"}),
    "layers": (OPTIONS["plain"], {"layers_to_transform": [1]}),
    "one layer": (OPTIONS["plain"], {"layers_to_transform": 0}),
}


@pytest.mark.parametrize("entry", LOST)
def test_a_configuration_that_lost_an_entry_is_refused(entry: str, base: StateSource, tmp_path: Path) -> None:
    options, lost = LOST[entry]
    train(clip(), tmp_path, **options)
    edit_config(**lost)(tmp_path)
    with pytest.raises(CheckpointError, match="adapter_config"):
        LoraSource(base, tmp_path)


def without(text: str) -> Callable[[Path], None]:
    return edit_weights(lambda w: {key: value for key, value in w.items() if text not in key})


@pytest.mark.parametrize(
    ("targets", "part", "message"),
    [
        (["q_proj", "v_proj"], "layers.1.self_attn.v_proj", r"1 of 4 .*'\S+layers\.1\.self_attn\.v_proj'"),
        (["q_proj", "v_proj"], "v_proj", r"2 of 4 .*'\S+layers\.0\.self_attn\.v_proj'"),
        (r".*\.(q_proj|fc1)", "layers.1.", r"2 of 4 .*'\S+layers\.1\.self_attn\.q_proj'"),
        ("all-linear", "layers.1.mlp.fc1", r"1 of 1\d .*'\S+layers\.1\.mlp\.fc1'"),
    ],
)
def test_adapters_that_lack_a_targeted_module_are_refused(
    targets: Any, part: str, message: str, base: StateSource, tmp_path: Path
) -> None:
    train(clip(), tmp_path, r=2, target_modules=targets)
    # peft expands all-linear as it saves; other tools keep it.
    edit_config(target_modules=targets)(tmp_path)
    LoraSource(base, tmp_path).require_complete(clip())
    without(part)(tmp_path)
    with refusing(CheckpointError, match=message, hint="exclude_modules"):
        LoraSource(base, tmp_path).require_complete(clip())
    if targets != "all-linear":
        edit_config(exclude_modules=rf".*{re.escape(part)}.*")(tmp_path)
        LoraSource(base, tmp_path).require_complete(clip())


def test_adapters_of_one_of_two_towers_are_complete(base: StateSource, tmp_path: Path) -> None:
    """As of a text model alone, whose modules are named like those of the vision tower."""
    train(clip(), tmp_path, **OPTIONS["plain"])
    both = nn.ModuleDict({"image": nn.ModuleDict({"model": clip()}), "text": clip()})
    edit_weights(lambda w: {k.replace("base_model.model.", "base_model.model.model."): v for k, v in w.items()})(
        tmp_path
    )
    LoraSource(base, tmp_path).require_complete(both)
    without("layers.0.self_attn.v_proj")(tmp_path)
    with pytest.raises(CheckpointError, match=r"1 of 4 .*'model\.encoder\S+\.0\.self_attn\.v_proj'"):
        LoraSource(base, tmp_path).require_complete(both)


def test_empty_tensors_are_named_with_their_cause(base: StateSource, tmp_path: Path) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    edit_weights(lambda w: {key: torch.zeros(0) for key in w})(tmp_path)
    with refusing(CheckpointError, match=r"8 of 8 tensors have shape \[0\]", hint="ZeRO-3"):
        LoraSource(base, tmp_path)


@pytest.mark.parametrize("width", [4, 9], ids=["square", "wide"])
@pytest.mark.parametrize("kind", ["Conv1D", "Linear"])
def test_adapters_that_would_be_transposed_wrongly_are_refused(kind: str, width: int, tmp_path: Path) -> None:
    """peft sets fan_in_fan_out by the module; the shapes of a square weight don't tell."""
    from transformers.pytorch_utils import Conv1D

    def model() -> nn.Module:
        return nn.Sequential(Conv1D(width, 4) if kind == "Conv1D" else nn.Linear(4, width))

    base = module_source(model(), "base")
    is_right = kind == "Conv1D"
    train(model(), tmp_path, r=2, target_modules=["0"], fan_in_fan_out=is_right)
    LoraSource(base, tmp_path).require_complete(model())
    edit_config(fan_in_fan_out=not is_right)(tmp_path)
    message, hint = f"fan_in_fan_out is {str(not is_right).lower()}", f"Set fan_in_fan_out to {str(is_right).lower()}"
    with refusing(CheckpointError, match=message, hint=hint):
        LoraSource(base, tmp_path).require_complete(model())


def test_tensors_under_an_adapters_name_are_read_as_peft_reads_them(base: StateSource, tmp_path: Path) -> None:
    expected = train(clip(), tmp_path, **OPTIONS["plain"])
    edit_weights(lambda w: {k.replace(".weight", ".default.weight"): v for k, v in w.items()})(tmp_path)
    merged = LoraSource(base, tmp_path)
    for key in base.headers:
        torch.testing.assert_close(merged.read(key), expected[key], rtol=0, atol=1e-6)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    with pytest.raises(CheckpointError, match=r"q_proj\.weight' \[8, 8\] fits no weight of other"):
        LoraSource(InMemorySource("other", {"layers.0.self_attn.q_proj.weight": torch.zeros(9, 8)}), tmp_path)


def test_adapters_without_a_base_are_no_model(tmp_path: Path) -> None:
    train(clip(), tmp_path, **OPTIONS["plain"])
    with pytest.raises(CheckpointError, match="holds LoRA adapters, not a whole model"):
        open_checkpoint(tmp_path)
