"""Raw inputs on their way to a model: moved, cast and weighed, whatever holds them."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, BatchFeature, ViTConfig, ViTModel

from driftlens.engine.walk import capture, input_bytes, on_device

CPU = torch.device("cpu")
HOLDERS = [dict, UserDict, MappingProxyType, BatchEncoding, BatchFeature]


def batch() -> dict[str, Any]:
    return {"pixel_values": torch.ones(2, 3, dtype=torch.float64), "position_ids": torch.arange(2)}


@pytest.mark.parametrize("holder", HOLDERS)
def test_floating_entries_of_every_mapping_are_cast(holder: Any) -> None:
    found = on_device(holder(batch()), CPU, torch.float16)
    assert type(found) is dict and list(found) == ["pixel_values", "position_ids"]
    assert found["pixel_values"].dtype == torch.float16 and found["position_ids"].dtype == torch.int64


@pytest.mark.parametrize("holder", HOLDERS)
def test_so_are_those_of_mappings_inside_others(holder: Any) -> None:
    found: Any = on_device(({"inner": holder(batch())}, [holder(batch())]), CPU, torch.float16)
    assert type(found) is tuple and type(found[1]) is tuple
    for inner in (found[0]["inner"], found[1][0]):
        assert inner["pixel_values"].dtype == torch.float16 and inner["position_ids"].dtype == torch.int64


@pytest.mark.parametrize("holder", HOLDERS)
def test_they_weigh_what_their_tensors_weigh(holder: Any) -> None:
    assert input_bytes(holder(batch())) == 2 * 3 * 8 + 2 * 8
    assert input_bytes([holder({"inner": holder(batch())}), "text", None]) == 64


def test_all_else_is_handed_on() -> None:
    texts, thing = ["one", "two"], object()
    assert on_device(texts, CPU, torch.float16) == ("one", "two")
    assert on_device(thing, CPU, torch.float16) is thing
    assert on_device({"flag": True, "none": None}, CPU, torch.float16) == {"flag": True, "none": None}
    assert on_device({}, CPU, torch.float16) == {} and input_bytes({}) == 0


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_model_sees_one_and_the_same_in_all(holder: Any) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = ViTModel(ViTConfig(image_size=16, patch_size=8, **sizes)).eval()
    pixels = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    plain = [vectors for _, vectors in capture(model, [pixels.float()])]
    held = [vectors for _, vectors in capture(model, [holder({"pixel_values": pixels})])]
    assert all(map(torch.equal, held, plain)) and len(held) == len(plain) > 2
