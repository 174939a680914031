"""Every command of README and docs runs, page by page in the order in which a reader types them, on small models."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import driftlens as dl
from driftlens.runs.run import DriftRun
from tests.cli.conftest import Cli
from tests.tutorials import PAGES as TUTORIALS
from tests.zoo.decoders import CONFIGS
from tests.zoo.suite import spec_of
from tests.zoo.world import CLASSES, TASKS, World, write_images, write_spec

ROOT = Path(__file__).resolve().parents[2]
RUNS = ("runs/ta", "runs/ta8", "RUN", "driftlens-demo")
"""What pages call a run that the reader has."""
LLAMA = "runs/llama"
"""What they call a run of language models."""
NOT_HERE = {
    r"demo": "tests/cli/test_demo.py runs it",
    r"ui ": "a server, which tests/browser starts",
    r"why ": "tests/cli/test_why.py runs it",
}
"""Commands that can't run in a test, and why."""
SCORES = "scores/model/results_2026-01-01T00-00-00.json"
"""Where lm-evaluation-harness, which a page runs in between, leaves its results."""


def commands(page: Path) -> list[list[str]]:
    """Words of the lines in a page's bash blocks that call driftlens."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = re.sub(r"(^|\s)#.*", "", "".join(blocks).replace("\\\n", " "), flags=re.MULTILINE)
    lines = re.findall(r"(?:^|&& )(driftlens .*?)(?= &&|$)", text, re.MULTILINE)  # indented, they are of a script
    return [shlex.split(line)[1:] for line in lines]


PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if commands(page) and page not in TUTORIALS.values()
]
"""All but the tutorials, which tests/test_tutorials.py runs as they are."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_tells_to_type_runs(
    page: Path,
    world: World,
    light: DriftRun,
    run_cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in RUNS:
        shutil.copytree(light.path, tmp_path / run)
    if LLAMA in page.read_text("utf-8"):
        (tmp_path / "llama").mkdir()
        texts = spec_of(CONFIGS["Llama"], tmp_path / "llama") | {"metrics": {"jacobian": False}}
        dl.analyze(texts, out=tmp_path / LLAMA, progress="none")
    (tmp_path / SCORES).parent.mkdir(parents=True)
    (tmp_path / SCORES).write_text(json.dumps({"results": {"arc_easy": {"acc,none": 0.75}}}))

    def filled_in() -> None:
        spec = world.one_task(metrics={"jacobian": False})
        # --auto chooses among 8 samples a task at least.
        write_images(tmp_path / "flowers.npz", CLASSES["flowers"], train=12, test=12)
        spec["data"] = {
            "defaults": {"n": 8, "n_diagnosis": 4},
            TASKS[0]: {"kind": "npz", "file": "flowers.npz"},
        }
        write_spec(tmp_path / "run.yaml", spec)

    filled_in()
    for words in commands(page):
        line = " ".join(words)
        if any(re.match(pattern, line) for pattern in NOT_HERE):
            continue
        if words[0] == "init":
            (tmp_path / "run.yaml").unlink()
        if words[0] == "analyze":
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        # A pattern stands for its files, as in a shell; the test is in `tmp_path`.
        done = run_cli(*(file for word in words for file in (sorted(Path().glob(word)) if "*" in word else [word])))
        assert done.code == 0, f"{page.name}: driftlens {line}\n{done.err}"
        if words[0] == "init":
            filled_in()  # as a reader would
