"""Experts with other tokenizers are refused by what differs; with other numbers of rows, unless they are aligned."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from driftlens.config.spec import load_spec
from driftlens.experiment.study_loading import OpenModels, open_models, open_pool
from driftlens.pipelines.validate import preflight
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import IncompatibleModelsError
from tests.zoo.decoders import llama, t5
from tests.zoo.suite import spec_of_folders
from tests.zoo.tokenizers import word_tokenizer


@pytest.fixture(params=[(llama, "decoder", "hf-decoder"), (t5, "encoder-decoder", "hf-t5")], ids=["llama", "t5"])
def spec(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """A base and two experts with their tokenizers; nothing else of the spec is opened."""
    make, form, loader = request.param
    tokenizer = word_tokenizer(form)
    for seed, name in enumerate(("base", "cars", "dtd")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            make(len(tokenizer)).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    entry = {"kind": "jsonl", "calibration": "none", "test": "none"}
    experts = {task: tmp_path / task for task in ("cars", "dtd")}
    return spec_of_folders(
        loader, tmp_path / "base", experts, dict.fromkeys(experts, entry), merge={"method": "average"}
    )


def opened(spec: dict[str, Any]) -> OpenModels:
    return open_models(load_spec(spec), Permissions(device="cpu"))


def resized(folder: Path, more: int) -> None:
    import transformers

    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, kind).from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + more)
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("more", [3, -2])
def test_rows_are_aligned_with_the_bases_where_the_spec_asks_for_it(spec: dict[str, Any], more: int) -> None:
    models = opened(spec)
    rows = models.architecture.skeleton.get_input_embeddings().num_embeddings  # type: ignore[operator]
    base, own = (
        {key: source.read(key).clone() for key in source.headers}
        for source in (models.sources["base"], models.sources["expert:cars"])
    )
    resized(Path(spec["experts"]["cars"]["weights"]), more)
    with pytest.raises(
        IncompatibleModelsError, match=f"cars.*: its vocabulary has {rows + more} rows, the base's {rows}"
    ):
        opened(spec)
    aligned = copy.deepcopy(spec)
    aligned["architecture"]["vocab"] = {"rows": "base"}
    found = opened(aligned)
    open_pool(load_spec(aligned), found, device="cpu")  # which compares all shapes
    [told] = found.notices
    assert ("dropped 3 rows" if more > 0 else "rows from the base") in told
    kept, source = min(rows, rows + more), found.sources["expert:cars"]
    for key, value in own.items():
        wanted = torch.cat((value[:kept], base[key][kept:])) if len(value) == rows else value
        assert source.headers[key].shape == value.shape
        assert torch.equal(source.read(key), wanted)
        if len(value) == rows:
            assert torch.equal(source.read(key, (kept - 1, rows)), wanted[kept - 1 :])
            assert torch.equal(source.read(key, (0, 2)), wanted[:2])


@pytest.mark.slow
def test_a_head_apart_where_the_base_has_none_or_the_reverse_is_refused_when_models_are_opened(
    spec: dict[str, Any],
) -> None:
    file = Path(spec["experts"]["cars"]["weights"]) / "model.safetensors"
    weights, head = load_file(file), "lm_head.weight"
    if head in weights:
        save_file({key: value for key, value in weights.items() if key != head}, file)
        told = "lacks 'lm_head.weight', and no config.json next to it ties"
    else:
        save_file({**weights, head: weights["shared.weight"].clone()}, file)  # as older versions wrote them
        opened(spec)
        save_file({**weights, head: weights["shared.weight"].flip(0).contiguous()}, file)
        told = "cars.* has an untied head .*; the base's is tied to its embeddings"
    with pytest.raises(IncompatibleModelsError, match=told):
        opened(spec)


def edited(change: Callable[[dict[str, Any]], Any], file: str = "tokenizer.json") -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        stated = json.loads((folder / file).read_text())
        change(stated)
        (folder / file).write_text(json.dumps(stated))

    return edit


def swap(stated: dict[str, Any]) -> None:
    vocabulary = stated["model"]["vocab"]
    vocabulary["red"], vocabulary["green"] = vocabulary["green"], vocabulary["red"]


def more_tokens(stated: dict[str, Any]) -> None:
    stated["added_tokens"].append({**stated["added_tokens"][0], "id": 99, "content": "<more>"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (edited(swap), "model in tokenizer.json"),
        (edited(lambda s: s.update(normalizer={"type": "Lowercase"})), "normalizer in tokenizer.json"),
        (edited(lambda s: s["added_tokens"][0].update(content="<x>")), "added_tokens in tokenizer.json"),
        (edited(more_tokens), ""),
        (edited(lambda s: s.update(padding_side="left", pad_token="</s>"), "tokenizer_config.json"), ""),
    ],
)
def test_another_tokenizer_is_refused_by_what_decides_on_ids(
    spec: dict[str, Any], change: Callable[[Path], None], told: str
) -> None:
    change(Path(spec["experts"]["dtd"]["weights"]))
    if not told:
        assert set(opened(spec).sources) == {"base", "expert:cars", "expert:dtd"}
        return
    with pytest.raises(IncompatibleModelsError, match=rf"dtd: its tokenizer .*\({told}\)"):
        opened(spec)
    found = preflight(load_spec(spec), access=Permissions(device="cpu")).problems
    assert any("its tokenizer differs from the base's" in problem.text for problem in found)
