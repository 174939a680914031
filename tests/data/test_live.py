"""Live Python objects: what is kept of them, and loaders that would show every model something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from driftlens.data.live import live_samples
from driftlens.errors import DataError

X = torch.arange(21.0).reshape(7, 3)
Y = torch.tensor([2, 0, 1, 2, 0, 1, 10])


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set without tensors of its own."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


SOURCES = {
    "a tensor": (X, False),
    "a list of tensors": ([X[:4], X[4:]], False),
    "a loader": (DataLoader(TensorDataset(X, Y), batch_size=4), True),
    "a loader without labels": (DataLoader(TensorDataset(X), batch_size=4), False),
    "a data set": (Rows(), True),
    "pairs": ([(X[:1], Y[:1]), (X[1:], Y[1:])], True),
}


@pytest.mark.parametrize(("source", "labelled"), SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("n", [None, 1, 4, 5, 7, 100])
def test_the_first_samples_are_kept_in_order(source: Any, labelled: bool, n: int | None) -> None:
    samples = live_samples("cars", source, n=n, batch_size=3)
    count = min(n or 7, 7)
    assert samples.ids == tuple(str(row) for row in range(count))
    assert torch.equal(torch.cat([batch.inputs for batch in samples.batches()]), X[:count])
    assert samples.labels == (tuple(str(int(label)) for label in Y[:count]) if labelled else None)
    assert torch.equal(samples.load([count - 1, 0]), X[[count - 1, 0]])


def test_a_batch_may_be_a_dict_of_tensors() -> None:
    batches = [({"ids": X[:4], "mask": Y[:4]}, Y[:4]), ({"ids": X[4:], "mask": Y[4:]}, Y[4:])]
    samples = live_samples("cars", batches, n=6)
    loaded = samples.load([5, 1])
    assert torch.equal(loaded["ids"], X[[5, 1]])
    assert torch.equal(loaded["mask"], Y[[5, 1]])
    assert samples.labels == ("2", "0", "1", "2", "0", "1")


def test_numbers_may_be_given_names() -> None:
    samples = live_samples("cars", [(X[:3], Y[:3])], class_names=["a", "b", "花"])
    assert samples.labels == ("花", "a", "b")
    with pytest.raises(DataError, match="label 10 is outside 0 to 2"):
        live_samples("cars", [(X, Y)], class_names=["a", "b", "c"])


def test_what_is_kept_does_not_follow_later_changes() -> None:
    source = X.clone()
    samples = live_samples("cars", [source, X])
    source.zero_()
    assert torch.equal(samples.load([1]), X[1:2])


def test_not_a_number_in_the_data_is_no_shuffling() -> None:
    holed = torch.tensor([[float("nan")], [1.0]])
    samples = live_samples("cars", holed)
    torch.testing.assert_close(samples.load([0, 1]), holed, rtol=0, atol=0, equal_nan=True)


class Noisy(Rows):
    """A data set with a random augmentation."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + torch.rand(3), Y[index]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            DataLoader(
                TensorDataset(X, Y), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0)
            ),
            id="a shuffling loader",
        ),
        pytest.param(Noisy(), id="a random augmentation"),
    ],
)
def test_batches_that_change_between_passes_are_refused(source: Any) -> None:
    with pytest.raises(DataError, match="differs when it is drawn again") as caught:
        live_samples("cars", source)
    assert "shuffle=False" in caught.value.hint
    assert "data['cars']" in caught.value.message


def generator() -> Iterator[Tensor]:
    yield X


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(generator(), "can be read only once", id="a generator"),
        pytest.param([], "no batches", id="no batches"),
        pytest.param(3, "got int", id="a number"),
        pytest.param({"x": X}, "got dict", id="a single dict"),
        pytest.param([X.numpy()], "a batch holds ndarray, expected tensors", id="arrays"),
        pytest.param([(X, Y, Y)], "a batch holds tuple", id="a triple"),
        pytest.param([{}], "a batch holds an empty dict", id="an empty dict"),
        pytest.param([(X, X)], "expected labels: whole numbers", id="floats for labels"),
        pytest.param([(X, Y[:3])], "lengths within a batch are", id="labels missing"),
        pytest.param([X[:0]], "lengths within a batch are", id="an empty batch"),
        pytest.param([X, X[:, :2]], "differ in shape between batches: [2], [3]", id="ragged batches"),
        pytest.param([(X, Y), X], "batches differ in what they hold", id="labels in some batches"),
        pytest.param([{"a": X}, {"b": X}], "batches differ in what they hold", id="other keys"),
    ],
)
def test_what_is_no_sequence_of_batches_is_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        live_samples("cars", source)
    assert message in caught.value.message
    assert caught.value.hint
