"""The table of limits in `docs/security.md`: every row as the code has it, each with the test that goes beyond it."""

from __future__ import annotations

import ast
import struct
import sys
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image

import driftlens.cli as cli
from driftlens.checkpoints import loading
from driftlens.checkpoints.loading import read_config
from driftlens.config import spec as spec_run, types
from driftlens.config.requests import MOST_DRAWS, Modules
from driftlens.config.spec import load_spec
from driftlens.data.sources import read_image
from driftlens.merging import method
from driftlens.models import architecture
from driftlens.results.projection import MOST_POINTS
from driftlens.utils.errors import DataError, IncompatibleModelsError, SpecError
from driftlens.utils.variants import LONGEST_FILE_NAME, safe_file_name
from driftlens_app import job_requests
from tests.pipelines.fixtures import world
from tests.reads.guard import MOST_GROWTH, SECONDS
from tests.refusing import refusing
from tests.zoo.world import World

__all__ = ["world"]

ROOT = Path(__file__).parents[2]

LIMITS: dict[str, tuple[str, str]] = {
    "any file": (
        "no device, pipe or socket; a spec may also be read from below `/dev` (`/dev/stdin`)",
        "reads/test_refused_inputs.py::test_devices_and_pipes_are_no_data",
    ),
    "spec, `--set`": (
        f"{types.MOST_CHARACTERS:,} characters, {types.MOST_NODES:,} values with aliases counted in full, "
        f"whole numbers of 64 bits",
        "reads/test_refused_inputs.py::test_values_that_are_none_are_refused_with_their_place",
    ),
    "experts": (
        f"{spec_run.MAX_EXPERTS:,}",
        "reads/test_refused_inputs.py::test_a_spec_of_more_experts_than_anybody_has_is_refused",
    ),
    "path in a spec": (
        f"{types.LONGEST_PART} characters a part, {types.LONGEST_PATH:,} in all, no control characters",
        "reads/test_limits.py::test_paths",
    ),
    "seed": (
        "below 2^63; of a projection below 2^32",
        "reads/test_promises.py::test_seeds_beyond_64_bits",
    ),
    "draws of a sweep": (f"{MOST_DRAWS:,}", "reads/test_promises.py::test_draws_without_end"),
    "gradient steps of a merge method": (
        f"{method.MOST_STEPS:,}",
        "merging/test_methods.py::test_settings_out_of_range_are_refused",
    ),
    "points of a projection": (
        f"{MOST_POINTS:,}",
        "results/test_projection.py::test_what_makes_no_sense_is_refused",
    ),
    "name of a task": (
        f"{LONGEST_FILE_NAME} characters as a file name; a character outside A to Z, digits, `-`, `_` and `.` counts "
        "as 3 to 12; no control characters",
        "reads/test_limits.py::test_names_of_tasks",
    ),
    "JSON": (
        "as deep as Python reads without exhausting its stack, whole numbers of 4,300 digits",
        "reads/test_promises.py::test_json_that_is_none_in_an_index_or_in_lines",
    ),
    "configuration of a model": (
        f"{loading.MOST_LAYERS:,} layers, {loading.MOST_LABELS:,} labels, {architecture.MAX_FILLED:,} values filled "
        "into one tensor while it is built",
        "reads/test_limits.py::test_configurations",
    ),
    "image": (
        f"{2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, Pillow's bound of a decompression bomb; no PostScript",
        "reads/test_limits.py::test_images",
    ),
    "message on the terminal": (
        f"{cli.MAX_LINES} lines of {cli.MAX_COLUMNS:,} characters",
        "reads/test_refused_inputs.py::test_messages_end_on_their_first_page",
    ),
    "spec in the dashboard": (
        f"{job_requests.MAX_SPEC_BYTES:,} bytes",
        "app/test_new_runs.py::test_a_file_that_is_larger_than_a_spec_may_be_is_not_offered",
    ),
    "reading any one of these": (
        f"{SECONDS:g} s of CPU time, {MOST_GROWTH >> 20} GiB",
        "reads/test_reads.py::test_command_lines",
    ),
}
"""Row of the table -> its limit, from the code, and a test of it."""


def test_the_table_is_what_the_code_does() -> None:
    text = (ROOT / "docs/security.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    table = [f"| {name} | {limit} |" for name, (limit, _) in LIMITS.items()]
    assert rows[rows.index("| input | limit |") + 1 :] == table


@pytest.mark.parametrize("test", sorted({test for _, test in LIMITS.values()}))
def test_every_limit_has_its_test(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_numbers_have_as_many_digits_as_python_reads() -> None:
    assert sys.get_int_max_str_digits() == 4300


@pytest.mark.parametrize("longest", [types.LONGEST_PART, types.LONGEST_PATH])
def test_paths(world: World, longest: int) -> None:
    parts = longest // types.LONGEST_PART
    path = "/" + "/".join(["x" * types.LONGEST_PART] * parts)[: longest - 1].rstrip("/")
    assert load_spec(world.spec(base={"weights": path})).base is not None
    beyond = path + "x" * (types.LONGEST_PART + 1) if parts == 1 else f"{path}/{'x/' * types.LONGEST_PATH}"
    with pytest.raises(SpecError, match="no path can have this name"):
        load_spec(world.spec(base={"weights": beyond}))


@pytest.mark.parametrize("letter", ["a", "花", "\N{GRINNING FACE}"])
def test_names_of_tasks(world: World, tmp_path: Path, letter: str) -> None:
    """From a file and from Python: the longest can name a file beside any ending that is put behind it."""
    most = LONGEST_FILE_NAME // len(safe_file_name(letter))
    for count in (most, most + 1):
        name, spec = letter * count, world.spec()
        first, *_ = spec["experts"]
        for section in ("experts", "data", "heads"):
            spec[section] = {name if task == first else task: at for task, at in spec[section].items()}
        if count == most:
            (tmp_path / f"{safe_file_name(name)}.safetensors").touch()
            assert name in load_spec(spec).experts
            continue
        module = torch.nn.Linear(1, 1)
        for refuse, given in (
            (load_spec, (spec,)),
            (Modules, (module, {name: module}, {name: torch.ones(2, 1)})),
        ):
            with refusing(SpecError, f"of {count} characters", f"{LONGEST_FILE_NAME} fit", match="Shorten"):
                refuse(*given)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("key", "most"),
    [
        *((key, loading.MOST_LAYERS) for key in ("num_hidden_layers", "layers", "depth")),
        ("num_labels", loading.MOST_LABELS),
    ],
)
def test_configurations(tmp_path: Path, key: str, most: int) -> None:
    (tmp_path / "config.json").write_text(f'{{"{key}": {most}}}')
    assert read_config(str(tmp_path), "config.json") == {key: most}
    (tmp_path / "config.json").write_text(f'{{"vision": {{"{key}": {most + 1}}}}}')
    with pytest.raises(IncompatibleModelsError, match=f"At most {most:,}|{most + 1:,}"):
        read_config(str(tmp_path), "config.json")


def test_tensors_that_no_model_has_are_not_filled() -> None:
    module = architecture.build_on_meta(lambda: torch.nn.Linear(2, 3), "small")
    assert module.weight.is_meta

    def build() -> torch.nn.Module:
        made = torch.nn.Module()
        made.weight = torch.nn.Parameter(torch.randn(architecture.MAX_FILLED + 1))
        return made

    with pytest.raises(ValueError, match="the limit is"):
        architecture.build_on_meta(build, "large")


def test_images(tmp_path: Path) -> None:
    """A header alone that promises as many pixels as are refused: nothing of them is there."""
    side = 1 << 15
    assert side * side > 2 * (Image.MAX_IMAGE_PIXELS or 0)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    made = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    file = tmp_path / "bomb.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + made)
    with pytest.raises(DataError, match=r"bomb\.png: can't be read"):
        read_image(file)
