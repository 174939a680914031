"""Selecting layers: what a pattern means, and what is said where it means nothing."""

from __future__ import annotations

import pytest

from driftlens.engine.sites import select_layers
from driftlens.utils.errors import LayerNotFoundError

PATHS = ["conv1", *(f"transformer.resblocks.{block}" for block in range(12)), "ln_post"]
STEM, HEAD = 1, 14


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [
        pytest.param("blocks", range(2, 14), id="all blocks"),
        pytest.param("transformer.resblocks.1", [3], id="one path, and not block 10"),
        pytest.param("transformer.resblocks.1?", [12, 13], id="a glob"),
        pytest.param(["transformer.resblocks.11", 2, 2], [2, 13], id="patterns and indices in any order"),
        pytest.param(5, [5], id="an index"),
        pytest.param("final", [], id="the head"),
        pytest.param("ln_post", [], id="the head by its path"),
    ],
)
def test_stem_and_head_always_stand_around_the_chosen_blocks(pattern: object, blocks: list[int]) -> None:
    assert select_layers(PATHS, pattern) == [STEM, *blocks, HEAD]  # type: ignore[arg-type]


def test_patterns_tell_upper_from_lower_case() -> None:
    with pytest.raises(LayerNotFoundError):
        select_layers(PATHS, "Transformer.*")


def test_a_pattern_without_a_match_names_the_three_nearest_paths() -> None:
    with pytest.raises(LayerNotFoundError) as caught:
        select_layers(PATHS, ["blocks", "transformer.resblock.7"])
    assert caught.value.context["nearest"][0] == "transformer.resblocks.7"
    assert all(path in caught.value.message for path in caught.value.context["nearest"])
    assert len(caught.value.context["nearest"]) == 3


@pytest.mark.parametrize("index", [0, 15, -1])
def test_an_index_outside_the_model_is_refused_with_the_range(index: int) -> None:
    with pytest.raises(LayerNotFoundError, match=r"1 \(stem\) to 14 \(head\)"):
        select_layers(PATHS, [index])


def test_a_model_of_one_block_has_three_layers() -> None:
    assert select_layers(["stem", "block", "head"], "blocks") == [1, 2, 3]
