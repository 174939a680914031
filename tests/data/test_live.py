"""Live Python objects: what is kept of them, and loaders that would show every model something else."""

from __future__ import annotations

import sys
import types
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BatchEncoding, BatchFeature

from driftlens.experiment.live import sample_live_data
from driftlens.utils.errors import DataError
from tests.refusing import refusing

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
    "a batch with labels": ((X, Y), True),
    "a batch with a list of labels": ((X, Y.tolist()), True),
    "two batches": ((X[:3], X[3:]), False),
    "pairs": ([(X[:1], Y[:1]), (X[1:], Y[1:])], True),
}


@pytest.mark.parametrize(("source", "labelled"), SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("n", [None, 7, 100])
def test_all_samples_are_kept_in_order(source: Any, labelled: bool, n: int | None) -> None:
    samples = sample_live_data("cars", source, n=n, batch_size=3)
    assert samples.ids == tuple(map(str, range(7)))
    assert torch.equal(torch.cat([batch.inputs for batch in samples.batches()]), X)
    assert samples.labels == (tuple(str(int(label)) for label in Y) if labelled else None)
    assert torch.equal(samples.load([6, 0]), X[[6, 0]])
    assert samples.notices == ()


@pytest.mark.parametrize(("source", "labelled"), SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("n", [1, 4, 5])
def test_fewer_samples_are_drawn_at_random_and_known_by_their_place(source: Any, labelled: bool, n: int) -> None:
    samples = sample_live_data("cars", source, n=n, batch_size=3, seed=5)
    rows = [int(name) for name in samples.ids]
    assert len(set(rows)) == len(rows) == n
    assert torch.equal(torch.cat([batch.inputs for batch in samples.batches()]), X[rows])
    assert samples.labels == (tuple(str(int(Y[row])) for row in rows) if labelled else None)
    assert sample_live_data("cars", X, n=n, seed=5).ids == samples.ids, "the seed alone decides"
    assert samples.notices == (f"task cars: {n} of 7 samples were sampled with seed 5",)
    assert len({sample_live_data("cars", X, n=n, seed=seed).ids for seed in range(9)}) > 1


def doubled(rows: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": 2 * torch.stack([x for x, _ in rows])}, torch.stack([y for _, y in rows])


@pytest.mark.parametrize("n", [None, 3])
def test_a_loader_that_shuffles_is_read_in_the_order_of_its_data_set(n: int | None) -> None:
    loader = DataLoader(Rows(), batch_size=2, shuffle=True, collate_fn=doubled)
    state = torch.get_rng_state()
    samples = sample_live_data("cars", loader, n=n)
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
    samples = sample_live_data("cars", Stream(), n=3)
    assert samples.ids == ("0", "1", "2") and torch.equal(samples.load([0, 1, 2]), X[:3])
    assert samples.notices == ("task cars: the first 3 samples are used; give a Dataset to sample at random",)


def test_a_batch_may_be_a_dict_of_tensors() -> None:
    batches = [({"ids": X[:4], "mask": Y[:4]}, Y[:4]), ({"ids": X[4:], "mask": Y[4:]}, Y[4:])]
    samples = sample_live_data("cars", batches)
    loaded = samples.load([5, 1])
    assert torch.equal(loaded["ids"], X[[5, 1]])
    assert torch.equal(loaded["mask"], Y[[5, 1]])
    assert samples.labels == ("2", "0", "1", "2", "0", "1", "10")


def test_numbers_may_be_given_names() -> None:
    samples = sample_live_data("cars", [(X[:3], Y[:3])], class_names=["a", "b", "花"])
    assert samples.labels == ("花", "a", "b")
    with pytest.raises(DataError, match="label 10 is outside 0 to 2"):
        sample_live_data("cars", [(X, Y)], class_names=["a", "b", "c"])


@pytest.mark.parametrize("kind", [dict, UserDict, BatchFeature, BatchEncoding])
@pytest.mark.parametrize("key", ["labels", "label"])
def test_labels_in_a_mapping_are_labels_and_no_input(kind: Callable[[Any], Any], key: str) -> None:
    batches = [kind({"pixel_values": X[:4], key: Y[:4]}), kind({"pixel_values": X[4:], key: Y[4:]})]
    samples = sample_live_data("cars", batches)
    loaded = samples.load(range(7))
    assert list(loaded) == ["pixel_values"] and torch.equal(loaded["pixel_values"], X)
    assert samples.labels == tuple(str(int(label)) for label in Y)
    assert samples.notices == ()


@pytest.mark.parametrize(
    "labels",
    [X, Y[:, None], Y[0], None, Y.double()],
    ids=["floats", "tokens", "a number", "none", "floats [n]"],
)
def test_labels_in_a_mapping_that_are_no_classes_are_left_out(labels: Any) -> None:
    samples = sample_live_data("cars", [{"x": X, "labels": labels}])
    assert list(samples.load([0])) == ["x"] and samples.labels is None
    assert samples.notices == ("task cars: ignored in every batch: labels",)


def test_what_follows_the_labels_and_text_are_left_out() -> None:
    rows = [({"x": X[at], "text": "a b"}, int(Y[at]), at, f"{at}.png") for at in range(7)]
    batches = [({"x": X, "text": ["a"] * 7}, Y, torch.arange(7), ("x",) * 7)]
    for source in (DataLoader(rows, batch_size=3), batches):  # type: ignore[arg-type]
        samples = sample_live_data("cars", source)
        assert list(samples.load([0])) == ["x"] and torch.equal(samples.load(range(7))["x"], X)
        assert samples.labels == tuple(str(int(label)) for label in Y)
        assert [notice.rpartition(": ")[2] for notice in samples.notices] == [
            "text",
            "what follows the labels",
        ]


def test_labels_may_be_names() -> None:
    samples = sample_live_data("cars", [(X[:2], ("b", "a")), (X[2:3], ["花"])], class_names=["a", "b", "花"])
    assert samples.labels == ("b", "a", "花")
    assert samples.notices == ()
    with pytest.raises(DataError, match="only in data: '花'"):
        sample_live_data("cars", [(X[:1], ["花"])], class_names=["a", "b"])


@pytest.mark.parametrize(
    ("numbers", "rows", "names", "notice"),
    [
        pytest.param([1, 0], ["b", "a"], ("a", "b"), "index the head's classes: 1 is 'a'", id="index"),
        pytest.param([1, 0], ["0", "1"], ("1", "0"), "", id="names that are their rows"),
        pytest.param([1, 3], ["3", "2", "1"], ("1", "3"), "used as names: 1 is row 2", id="names elsewhere"),
    ],
)
def test_numbers_meet_named_classes(numbers: list[int], rows: list[str], names: tuple[str, ...], notice: str) -> None:
    samples = sample_live_data("cars", [(X[:2], torch.tensor(numbers))], class_names=rows)
    assert samples.labels == names
    assert [notice in told for told in samples.notices] == ([True] if notice else [])


class Named(Rows):
    """As torchvision's data sets are."""

    classes = tuple("abcdefghijk")


def test_numbers_mean_what_the_data_set_says() -> None:
    names = tuple(Named.classes[int(label)] for label in Y)
    shuffled = [*reversed(Named.classes), "more"]
    for rows in (None, shuffled):
        samples = sample_live_data("cars", Named(), class_names=rows)
        assert (samples.labels, samples.notices) == (names, ())
    numbers = [str(number) for number in range(11)]
    assert sample_live_data("cars", Named(), class_names=numbers).labels == tuple(numbers[int(y)] for y in Y)
    with pytest.raises(DataError, match="only in data: 'k'"):
        sample_live_data("cars", DataLoader(Named()), class_names=list("abcdefghij!"))


LENGTHS = [3, 1, 4, 1, 5, 2, 6]


def sequence(at: int) -> dict[str, Any]:
    ids = 10 * at + torch.arange(1, LENGTHS[at] + 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": int(Y[at])}


def padded_batches() -> list[dict[str, Tensor]]:
    """Every batch as long as its longest sequence, with embeddings beside the ids."""
    batches = []
    for rows in ([0, 1, 2], [3], [4, 5, 6]):
        ids = torch.nn.utils.rnn.pad_sequence([sequence(at)["input_ids"] for at in rows], batch_first=True)
        embedded = ids[..., None].expand(-1, -1, 2).double()
        batches.append({"input_ids": ids, "attention_mask": (ids > 0).int(), "embedded": embedded})
    return batches


def hugging_face(form: str) -> Any:
    data = datasets.Dataset.from_list([{**sequence(at), "text": "a b"} for at in range(7)])
    if form == "plain":
        return data
    if form == "stream":
        return data.select(range(1)).to_iterable_dataset()
    if form == "set_format":
        return data.with_format("torch", columns=["input_ids", "attention_mask", "label"])
    return data.with_transform(lambda rows: BatchEncoding({key: rows[key] for key in rows if key != "text"}))


RAGGED: dict[str, Callable[[], Any]] = {
    "batches": padded_batches,
    "rows": lambda: DataLoader([sequence(at) for at in range(7)], batch_size=3),  # type: ignore[arg-type]
    "plain": lambda: hugging_face("plain"),
    "set_format": lambda: hugging_face("set_format"),
}


@pytest.mark.parametrize("n", [None, 4])
@pytest.mark.parametrize("source", RAGGED.values(), ids=RAGGED)
def test_sequences_of_different_lengths_are_padded_at_their_end(source: Callable[[], Any], n: int | None) -> None:
    samples = sample_live_data("cars", source(), n=n, batch_size=2)
    rows = [int(name) for name in samples.ids]
    loaded = samples.load(range(len(rows)))
    for at, ids, mask in zip(rows, loaded["input_ids"], loaded["attention_mask"], strict=True):
        assert torch.equal(ids[: LENGTHS[at]], sequence(at)["input_ids"])
        assert mask.tolist() == [1] * LENGTHS[at] + [0] * (len(mask) - LENGTHS[at])
        assert not ids[LENGTHS[at] :].any()
    if "embedded" in loaded:
        assert torch.equal(loaded["embedded"][..., 1], loaded["input_ids"].double())
    else:
        assert samples.labels == tuple(str(int(Y[at])) for at in rows)
        assert set(loaded) == {"input_ids", "attention_mask"}


def test_how_far_a_sample_is_padded_does_not_change_its_digest() -> None:
    whole = sample_live_data("cars", padded_batches())
    alone = sample_live_data("cars", padded_batches()[:1])
    assert alone.load([0])["input_ids"].shape < whole.load([0])["input_ids"].shape
    assert alone.digests == whole.digests[:3] == alone.unique_ids and len(set(whole.digests)) == 7
    on_the_left = padded_batches()
    for batch in on_the_left:
        fillers = (batch["attention_mask"] == 0).sum(dim=1).tolist()
        for name, value in batch.items():
            batch[name] = torch.stack([row.roll(count, 0) for row, count in zip(value, fillers, strict=True)])
        assert batch["attention_mask"][:, -1].all()
    assert sample_live_data("cars", on_the_left).digests == whole.digests
    batches = padded_batches()
    batches[0]["attention_mask"][0, 0] = 0
    batches[0]["embedded"][1, 0] += 1
    assert [a == b for a, b in zip(sample_live_data("cars", batches).digests, whole.digests, strict=True)] == [
        *(False, False, True),
        *[True] * 4,
    ]


def test_a_hugging_face_data_set_is_read_as_it_is_formatted() -> None:
    features = datasets.Features(
        {
            "x": datasets.List(datasets.Value("float32")),
            "label": datasets.ClassLabel(names=list("abcdefghijk")),
        }
    )
    data = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}, features=features)
    transformed = data.with_transform(
        lambda rows: BatchFeature({"pixel_values": 2 * torch.tensor(rows["x"]), "label": rows["label"]})
    )
    for source, key, scale in (
        (data, "x", 1),
        (data.with_format("numpy"), "x", 1),
        (transformed, "pixel_values", 2),
    ):
        samples = sample_live_data("cars", source, n=5, batch_size=2, class_names=list("kjihgfedcba"))
        rows = [int(name) for name in samples.ids]
        assert torch.equal(samples.load(range(5))[key], scale * X[rows])
        assert samples.labels == tuple("abcdefghijk"[int(Y[row])] for row in rows)
    stream = sample_live_data("cars", data.to_iterable_dataset(), n=5, batch_size=2)
    assert torch.equal(stream.load(range(5))["x"], X[:5])
    assert stream.labels == tuple(str(int(label)) for label in Y[:5])


def test_a_module_of_the_users_may_be_called_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    own = types.ModuleType("datasets")
    own.Dataset = Rows  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name.startswith("datasets.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "datasets", own)
    assert torch.equal(sample_live_data("cars", Rows()).load(range(7)), X)


def test_images_need_the_models_preprocessing_first() -> None:
    image = Image.new("RGB", (4, 4))
    with refusing(DataError, match="column 'picture' holds images", hint="with_transform"):
        sample_live_data("cars", datasets.Dataset.from_dict({"picture": [image, image]}))


def test_what_is_kept_does_not_follow_later_changes() -> None:
    source = X.clone()
    samples = sample_live_data("cars", [source, X])
    source.zero_()
    assert torch.equal(samples.load([1]), X[1:2])


def test_not_a_number_in_the_data_is_no_shuffling() -> None:
    holed = torch.tensor([[float("nan")], [1.0]])
    samples = sample_live_data("cars", holed)
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
    with refusing(DataError, "data['cars']", match="differs when read again", hint="shuffle only"):
        sample_live_data("cars", source)


def generator() -> Iterator[Tensor]:
    yield X


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param(generator(), "is read only once", id="a generator"),
        pytest.param([], "no batches", id="no batches"),
        pytest.param({"x": X}, "a batch holds str", id="a single dict"),
        pytest.param([X.numpy()], "a batch holds ndarray, expected tensors", id="arrays"),
        pytest.param([(X, X, Y)], "the second entry of a batch is torch.float32", id="two inputs in a tuple"),
        pytest.param([{"labels": Y}], "a batch holds no inputs", id="nothing but labels"),
        pytest.param([{"x": [[1, 2], [3]]}], "a batch holds list, expected tensors", id="lists of numbers"),
        pytest.param([{}], "a batch holds an empty dict", id="an empty dict"),
        pytest.param([(X, X)], "expected integer labels", id="floats for labels"),
        pytest.param([(X, Y[:3])], "a batch has lengths", id="labels missing"),
        pytest.param([X[:0]], "a batch has lengths", id="an empty batch"),
        pytest.param([(X, Y), X], "batches have different entries", id="labels in some batches"),
        pytest.param([{"a": X}, {"b": X}], "batches have different entries", id="other keys"),
    ],
)
def test_what_is_no_sequence_of_batches_is_refused(source: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        sample_live_data("cars", source)
    assert message in caught.value.message
    assert caught.value.hint
