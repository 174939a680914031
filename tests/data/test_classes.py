"""Class names: compared by name, and differences told with the names that look alike."""

from __future__ import annotations

import pytest

from driftlens.base.errors import DataError
from driftlens.data.task_data import require_same_classes


def differing(data: list[str], head: list[str], *, all_of_head: bool = True) -> DataError:
    with pytest.raises(DataError) as caught:
        require_same_classes(data, head, where="task cars", all_of_head=all_of_head)
    return caught.value


def test_the_same_names_in_another_order_are_accepted() -> None:
    require_same_classes(["b", "花", "a"], ["a", "b", "花"], where="task cars")


def test_both_sides_of_a_difference_are_listed() -> None:
    error = differing(["a", "c"], ["a", "b"])
    difference = "the classes of the data and of the head differ; only in data: 'c'; only in head: 'b'"
    assert error.message == f"task cars: {difference}"
    assert (error.context["only_in_data"], error.context["only_in_head"]) == (["c"], ["b"])


def test_long_differences_are_cut_with_their_number() -> None:
    error = differing([f"x{i:02d}" for i in range(13)], ["a"])
    assert "'x09' and 3 more" in error.message
    assert "'x10'" not in error.message
    assert len(error.context["only_in_data"]) == 13


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("T-Shirt_top", "t-shirt/top"), ("annual_crop_land", "Annual Crop Land"), ("Blu\u0308te", "Bl\u00fcte")],
    ids=["case and slash", "underscores", "composed accents"],
)
def test_names_that_look_alike_are_pointed_out(ours: str, theirs: str) -> None:
    assert f"{ours!r} looks like {theirs!r}" in differing([ours, "x"], [theirs, "x"]).hint


def test_numbers_for_names_have_a_remedy_of_their_own() -> None:
    assert "store the names" in differing(["0", "1"], ["zero", "one"]).hint


def test_a_split_that_serves_no_accuracy_may_lack_classes_but_not_add_any() -> None:
    require_same_classes(["a"], ["a", "b"], where="task cars", all_of_head=False)
    error = differing(["a", "c"], ["a", "b"], all_of_head=False)
    assert "only in data: 'c'" in error.message
    assert "only in head" not in error.message
