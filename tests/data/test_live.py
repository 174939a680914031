"""Live Python objects: what is kept of them, and loaders that would show every model something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BatchEncoding

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
@pytest.mark.parametrize("n", [None, 7, 100])
def test_all_samples_are_kept_in_order(source: Any, labelled: bool, n: int | None) -> None:
    samples = live_samples("cars", source, n=n, batch_size=3)
    assert samples.ids == tuple(map(str, range(7)))
    assert torch.equal(torch.cat([batch.inputs for batch in samples.batches()]), X)
    assert samples.labels == (tuple(str(int(label)) for label in Y) if labelled else None)
    assert torch.equal(samples.load([6, 0]), X[[6, 0]])
    assert samples.notices == ()


@pytest.mark.parametrize(("source", "labelled"), SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("n", [1, 4, 5])
def test_fewer_samples_are_drawn_at_random_and_known_by_their_place(
    source: Any, labelled: bool, n: int
) -> None:
    samples = live_samples("cars", source, n=n, batch_size=3, seed=5)
    rows = [int(name) for name in samples.ids]
    assert len(set(rows)) == len(rows) == n
    assert torch.equal(torch.cat([batch.inputs for batch in samples.batches()]), X[rows])
    assert samples.labels == (tuple(str(int(Y[row])) for row in rows) if labelled else None)
    assert live_samples("cars", X, n=n, seed=5).ids == samples.ids, "the seed alone decides"
    assert samples.notices == (f"task cars: {n} of 7 samples are drawn at random with seed 5",)
    assert len({live_samples("cars", X, n=n, seed=seed).ids for seed in range(9)}) > 1


def test_sorted_data_give_every_class() -> None:
    labels = torch.arange(1000) // 100
    samples = live_samples("cars", TensorDataset(labels[:, None].float(), labels), n=200)
    assert samples.labels is not None
    assert set(samples.labels) == {str(label) for label in range(10)}


def doubled(rows: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": 2 * torch.stack([x for x, _ in rows])}, torch.stack([y for _, y in rows])


@pytest.mark.parametrize("n", [None, 3])
def test_a_loader_that_shuffles_is_read_in_the_order_of_its_data_set(n: int | None) -> None:
    loader = DataLoader(Rows(), batch_size=2, shuffle=True, collate_fn=doubled)
    state = torch.get_rng_state()
    samples = live_samples("cars", loader, n=n)
    assert torch.equal(torch.get_rng_state(), state)
    rows = [int(name) for name in samples.ids]
    assert rows == (list(range(7)) if n is None else rows) and len(rows) == (n or 7)
    assert torch.equal(samples.load(range(len(rows)))["x"], 2 * X[rows])
    assert samples.labels == tuple(str(int(Y[row])) for row in rows)
    assert samples.notices[0].startswith("task cars: the loader shuffles")


class Stream:
    """An iterable that can be started again and doesn't know its length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.split(X, 2))


def test_of_a_stream_the_first_samples_are_taken_and_that_is_said() -> None:
    samples = live_samples("cars", Stream(), n=3)
    assert samples.ids == ("0", "1", "2") and torch.equal(samples.load([0, 1, 2]), X[:3])
    assert samples.notices == (
        "task cars: the first 3 samples are taken; give a Dataset to have them drawn at random",
    )


def test_a_tokenizers_batch_is_a_batch() -> None:
    batch = BatchEncoding({"input_ids": Y[:, None], "attention_mask": Y[:, None] > 0})
    loaded = live_samples("cars", [batch, batch]).load([0, 13])
    assert sorted(loaded) == ["attention_mask", "input_ids"]
    assert torch.equal(loaded["input_ids"], Y[[0, 6], None])


def test_a_batch_may_be_a_dict_of_tensors() -> None:
    batches = [({"ids": X[:4], "mask": Y[:4]}, Y[:4]), ({"ids": X[4:], "mask": Y[4:]}, Y[4:])]
    samples = live_samples("cars", batches)
    loaded = samples.load([5, 1])
    assert torch.equal(loaded["ids"], X[[5, 1]])
    assert torch.equal(loaded["mask"], Y[[5, 1]])
    assert samples.labels == ("2", "0", "1", "2", "0", "1", "10")


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


class Shuffling:
    """Batches in an order of their own every time."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(X[torch.randperm(7, generator=self.generator)].split(4))


@pytest.mark.parametrize("source", [Shuffling(), Noisy()], ids=["shuffled batches", "random augmentation"])
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
