"""Pickled checkpoints: the state dict that PyTorch itself would give, and nothing of what a file may want to run."""

from __future__ import annotations

import collections
import contextlib
import functools
import pathlib
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driftlens.base.errors import CheckpointError
from driftlens.checkpoints import weight_files
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.checkpoints.pickles import Inert, Unpickled
from driftlens.checkpoints.weight_files import open_pickled
from tests.models.hostile import (
    Calls,
    float_storage,
    hostile,
    in_archive,
    in_old_file,
    rebuilt,
    tensor_pickle,
)
from tests.refusing import refusing

Save = Callable[[object, pathlib.Path], object]


FORMS: dict[str, Save] = {
    "zip": torch.save,
    "before_1_6": functools.partial(torch.save, _use_new_zipfile_serialization=False),
    "plain": lambda content, path: path.write_bytes(pickle.dumps(content)),
    "plain_protocol_2": lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2)),
}


@pytest.fixture
def code() -> Iterator[types.ModuleType]:
    """A module of somebody's training code, which is gone when the file is read."""
    module = types.ModuleType("src.modeling")
    source = """
import enum, torch
class Mode(enum.Enum):
    A = "a"
    def __reduce_ex__(self, protocol):  # as Python 3.11.0 to 3.11.3 has it
        return getattr, (type(self), self.name)
class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 2), torch.nn.BatchNorm2d(4), torch.nn.LayerNorm(4))
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.attention.out_proj.weight
        self.halved = torch.nn.Parameter(torch.randn(4, 6).t()[1:5].to(torch.bfloat16))
        self.register_buffer("kept", torch.arange(5)[2:])
        self.register_buffer("dropped", torch.ones(3), persistent=False)
        self.none = torch.nn.Linear(2, 2, bias=False)
        self.options = {"lr": 0.1, "names": {"a", "b"}, "device": torch.device("cpu"), ("a", 1): 2, "dtype": torch.half}
        self.mode = Mode.A
        self.function = helper
def helper(image):
    raise AssertionError("called")
"""
    exec(source, vars(module))
    sys.modules |= {"src": types.ModuleType("src"), "src.modeling": module}
    yield module
    sys.modules.pop("src.modeling", None)
    sys.modules.pop("src")


@pytest.mark.parametrize("form", FORMS)
def test_a_pickled_module_gives_its_state_dict_without_its_code(
    form: str, code: types.ModuleType, tmp_path: pathlib.Path
) -> None:
    module, path = code.Encoder(), tmp_path / "encoder.pt"
    old = form == "before_1_6"  # which also wants to keep the source of the classes
    with pytest.warns(UserWarning, match="source code") if old else contextlib.nullcontext():
        FORMS[form](module, path)
    del sys.modules["src.modeling"]
    before = set(sys.modules)
    source = open_pickled(path)
    imported = {name for name in sys.modules if not name.startswith("encodings.")} - before
    assert not imported, "nothing but Python's own codecs is imported"
    expected = module.state_dict()
    assert list(source.headers) == list(expected)
    for key, value in expected.items():
        read = source.read(key)
        assert (source.headers[key].shape, source.headers[key].dtype) == (tuple(value.shape), value.dtype)
        assert read.dtype == value.dtype and torch.equal(read, value), key
    assert isinstance(source.top, Inert) and source.top.kind == "src.modeling.Encoder"
    assert source.top.attribute("mode") == Inert("src.modeling.Mode.A")
    assert source.modules["attention"].attribute("num_heads") == 2
    assert torch.equal(source.read("tied.weight", (1, 3)), expected["tied.weight"][1:3])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "options": pathlib.PurePosixPath("x"), "epoch": 3},
        lambda state: {"model": nn.ParameterDict(state), "step": 1},
        lambda state: collections.OrderedDict(state, note="not a tensor"),
    ],
    ids=["state dict", "training checkpoint", "module in a checkpoint", "mixed"],
)
def test_state_dicts_are_found_wherever_checkpoints_keep_them(
    form: str, wrap: Callable[[dict[str, Tensor]], object], tmp_path: pathlib.Path
) -> None:
    state = {
        "a": nn.Parameter(torch.randn(2, 3)),
        "b": nn.Parameter(torch.zeros(0, 2)),
        "c": nn.Parameter(torch.ones(())),
    }
    path = tmp_path / "w.ckpt"
    FORMS[form](wrap(state), path)
    source = open_pickled(path)
    assert set(source.headers) == set(state)
    assert all(torch.equal(source.read(key), value) for key, value in state.items())


# --- what is refused


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"encoder": {"trunk": state}},
        lambda state: {"encoder": nn.ParameterDict(state)},
        lambda state: nn.Sequential(nn.Linear(2, 2)),
        lambda state: state["a"].numpy(),
    ],
    ids=["state dict", "nested deeper", "module in a mapping", "module", "array"],
)
def test_weights_that_would_be_left_out_are_refused_by_name(
    wrap: Callable[[dict[str, Tensor]], object], tmp_path: pathlib.Path
) -> None:
    state, path = {"a": torch.randn(2, 3)}, tmp_path / "w.pt"
    torch.save({"lr": 0.1, "net": wrap(state), "best_acc": torch.tensor(0.9)}, path)
    with refusing(CheckpointError, match="its entry 'net' holds weights too", hint="under one of state_dict"):
        open_pickled(path)
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2, 3)}}, "param_groups": [{"params": [0]}]}
    torch.save({**state, "optimizer": optimizer, "loss": nn.MSELoss()}, path)
    assert set(open_pickled(path).headers) == {"a"}


@pytest.mark.parametrize(
    "wrap", [bytes, lambda content: in_archive(content, {}), in_old_file], ids=["plain", "zip", "old"]
)
def test_nothing_that_a_file_calls_is_called(wrap: Callable[[bytes], bytes], tmp_path: pathlib.Path) -> None:
    canary, path = tmp_path / "canary", tmp_path / "trap.pt"
    traps = hostile(canary)
    for name, content in traps.items():
        with contextlib.suppress(Exception):  # some end in an error, after the deed
            pickle.loads(content)
        assert canary.exists(), f"{name} should work where it is sprung"
        canary.unlink()
        path.write_bytes(wrap(content))
        with pytest.raises(CheckpointError, match=r"trap\.pt") as refusal:
            open_pickled(path)
        assert not canary.exists(), name
        assert "which is no part of weights" in refusal.value.message, name
        owner = refusal.value.context["found"].split(".")[0]
        assert owner in ("posix", "os", "io", "_io", "builtins", "pathlib", "functools"), name
        assert "torch.load(sys.argv[1]" in refusal.value.hint, "who trusts it is told how"


def test_calls_of_other_packages_are_refused_by_name_too(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "trap.pt"
    for function in (torch.load, torch.hub.load, Unpickled, getattr):
        path.write_bytes(pickle.dumps({"w": Calls(function, str(tmp_path / "other.pt"))}))
        name = f"{function.__module__}.{function.__qualname__}"
        with pytest.raises(CheckpointError, match=f"it uses {name}, which is no part of weights"):
            open_pickled(path)


FOUR = {"data/0": bytes(16)}
ODD_STORAGES: dict[str, tuple[Calls, dict[str, bytes], str]] = {
    "an offset beyond": (rebuilt(float_storage(), 3, (2,), (1,)), FOUR, "reaches beyond its storage of 4"),
    "a stride beyond": (rebuilt(float_storage(), 0, (2, 2), (3, 1)), FOUR, "reaches beyond"),
    "a stride below": (rebuilt(float_storage(), 3, (2,), (-1,)), FOUR, "whole numbers"),
    "an offset below": (rebuilt(float_storage(), -1, (2,), (1,)), FOUR, "whole numbers"),
    "one number for all": (rebuilt(float_storage(), 0, (10**6, 10**6), (0, 0)), FOUR, "reaches beyond"),
    "half a number": (rebuilt(float_storage(), 0, (1.5,), (1,)), FOUR, "whole numbers"),
    "no storage": (rebuilt("0", 0, (2,), (1,)), FOUR, "whole numbers"),
    "more than there is": (rebuilt(float_storage(count=5), 0, (5,), (1,)), FOUR, "should have 20 bytes"),
    "less than none": (rebuilt(float_storage(count=-4), 0, (4,), (1,)), FOUR, "numbers in a torch"),
    "out of the archive": (rebuilt(float_storage("../../../etc/passwd"), 0, (4,), (1,)), FOUR, "holds none"),
    "not in it": (rebuilt(float_storage("7"), 0, (4,), (1,)), FOUR, "holds none"),
    "quantised": (rebuilt(float_storage(kind=torch.QInt8Storage), 0, (4,), (1,)), FOUR, "torch.QInt8Storage"),
}


@pytest.mark.parametrize(("tensor", "records", "words"), ODD_STORAGES.values(), ids=ODD_STORAGES)
def test_storages_that_do_not_hold_the_tensor_are_refused(
    tensor: Calls, records: dict[str, bytes], words: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(in_archive(tensor_pickle(fine=rebuilt(float_storage(), 0, (4,), (1,))), records))
    assert torch.equal(open_pickled(path).read("fine"), torch.zeros(4))
    path.write_bytes(in_archive(tensor_pickle(odd=tensor), records))
    with pytest.raises(CheckpointError, match=words):
        open_pickled(path)


_DEEP = b"K\x01\x85" + b"q\x00h\x00\x86" * 20
"""A tuple of two that are the same tuple of two, and so on: a million numbers in 80 bytes."""


@pytest.mark.parametrize("name", ["data.pkl", "version"])
def test_weights_whose_parts_unfold_are_refused_before_they_do(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(in_archive(b"", {name: bytes(1 << 20)}, packed=True))
    with pytest.raises(CheckpointError, match="is compressed"):
        open_checkpoint(path)


def test_files_made_to_exhaust_a_machine_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bomb.pt"
    zeros = {"data/0": bytes(4 << 20)}
    one = float_storage(count=1 << 20)
    many = {f"t{row}": rebuilt(one, 0, (1 << 20,), (1,)) for row in range(9)}
    cases = {
        "one storage for many": (in_archive(tensor_pickle(**many), zeros), "would take"),
        "a far memo": (b"\x80\x02Nr\xff\xff\xff\x7f.", "NoneType without tensors"),
        "a long promise": (b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"abc.", "not a complete"),
        "a deep key": (b"\x80\x02}" + b"K\x01\x85" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", "without tensors"),
        "a deep text": (
            b"\x80\x02c_codecs\nencode\n" + _DEEP + b"X\x06\x00\x00\x00latin1\x86R.",
            "it uses _codecs.encode",
        ),
        "pairs without end": (
            b"\x80\x02ccollections\nOrderedDict\n](]q\x00("
            + b"N" * 2000
            + b"e"
            + b"h\x00" * 2000
            + b"e\x85R.",
            "too many values",
        ),
        "many axes": (
            in_archive(
                tensor_pickle(t=rebuilt(float_storage(), 0, (1,) * 65, (1,) * 65)), {"data/0": bytes(16)}
            ),
            "whole numbers",
        ),
        "a far axis": (
            in_archive(
                tensor_pickle(t=rebuilt(float_storage(), 0, (0, 1 << 63), (1, 1))), {"data/0": bytes(16)}
            ),
            "whole numbers",
        ),
    }
    for name, (content, words) in cases.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            open_pickled(path)
            pytest.fail(name)


def _repeated(called: bytes, given: bytes, opcode: bytes) -> bytes:
    """A pickle that does the same to the same two objects 500 times, and so copies what it holds once."""
    return b"\x80\x02" + called + b"q\x010" + given + b"q\x020(" + (b"h\x01h\x02" + opcode) * 500 + b"l."


def test_what_unfolds_without_end_is_stopped_elsewhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SECONDS", 0.2)
    path, names = tmp_path / "bomb.pt", dict.fromkeys(map(str, range(50)))
    items = b"N" * 400_000
    cases = {
        "a list": _repeated(b"cbuiltins\nlist\n", b"](" + items + b"e\x85", b"R"),
        "a size": _repeated(b"ctorch\nSize\n", b"](" + items + b"e\x85", b"R"),
        "modules": _shared_modules(60),
        "entries of modules": _shared_modules(60, names),
        "mappings": pickle.dumps(
            {"a": functools.reduce(lambda inner, _: {"a": inner, "b": inner}, range(60), {})}
        ),
    }
    for name, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="does more than any of weights: it takes"):
            open_pickled(path)
            pytest.fail(name)


def _shared_modules(depth: int, entries: dict[str, Any] | None = None) -> bytes:
    """A pickled module with two children that are the same module, and so on: 2**depth paths in a small file."""
    module: Any = None
    for _ in range(depth):
        children = {} if module is None else {"a": module, "b": module}
        parent = nn.Module()
        if entries:
            vars(parent)["_parameters"] = entries
        parent._modules.update(children)
        module = parent
    return pickle.dumps(module, protocol=2)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_cut_short_or_changed_is_refused_and_never_run(form: str, tmp_path: pathlib.Path) -> None:
    """Whatever becomes of a file's bytes: weights, or an error that names the file."""
    whole, path = tmp_path / "whole.pt", tmp_path / "w.pt"
    FORMS[form]({"weight": torch.arange(6.0), "bias": torch.ones(2, dtype=torch.half)}, whole)
    content, draw = whole.read_bytes(), random.Random(0)
    cut = [content[: int(len(content) * kept)] for kept in (0, 0.01, 0.3, 0.6, 0.9, 0.99)]
    changed = []
    for _ in range(150):
        bytes_now = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            bytes_now[draw.randrange(len(content))] = draw.randrange(256)
        changed.append(bytes(bytes_now))
    for damaged in (*cut, *changed):
        path.write_bytes(damaged)
        try:
            source = open_pickled(path)
            tensors = {key: source.read(key) for key in source.headers}
        except CheckpointError as error:
            assert str(path) in error.message and error.hint
        else:
            assert damaged not in cut and tensors


def test_what_holds_no_weights_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.pt"
    for content, words in (
        ({"lr": 0.1}, "a dict without tensors"),
        ({"state_dict": {}}, "a dict without tensors"),
        ([torch.zeros(2)], "a list without tensors"),
        (types.SimpleNamespace(weight=torch.zeros(2)), "an object types.SimpleNamespace without tensors"),
    ):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=words):
            open_pickled(path)
    torch.save({"a": torch.eye(2).to_sparse()}, path)
    with pytest.raises(CheckpointError, match="it holds a sparse tensor"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint64, torch.bool],
    ids=str,
)
def test_every_type_of_number_is_read(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    state = {"a": torch.tensor([0, 1, 2, 0, 5, 1]).to(dtype).reshape(2, 3), "b": torch.ones(1).to(dtype)}
    torch.save(state, tmp_path / "w.pt")
    source = open_checkpoint(tmp_path / "w.pt")
    for key, value in state.items():
        read = source.read(key)
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert torch.equal(read.view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(source.read("a", (1, 2)).view(torch.uint8), state["a"][1:2].view(torch.uint8))


def test_what_is_read_is_mapped_and_writing_to_it_leaves_the_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.arange(6.0)}, path)
    before, source = path.read_bytes(), open_checkpoint(path)
    source.read("a").zero_()
    assert path.read_bytes() == before and torch.equal(open_checkpoint(path).read("a"), torch.arange(6.0))
