"""A wheel and an sdist hold the package and nothing else, whatever lies about in the clone that they are built in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import driftlens as dl
from tests.pipeline.fixtures import world
from tests.zoo.world import World, write_spec

__all__ = ["world"]

ROOT = Path(__file__).parents[1]
PACKAGES = {"driftlens": ".", "driftlens_reports": "reports", "driftlens_app": "app"}
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # which building changes
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""
LEFTOVERS = [
    "driftlens-demo/spec.yaml",
    "driftlens-demo/manifest.json",
    "driftlens-demo/tables/layers.parquet",
    "driftlens-demo/reports/report.html",
    "driftlens_runs/__init__.py",
    "reports/driftlens-demo/spec.yaml",
    "app/driftlens-demo/manifest.json",
    "build/lib/driftlens/long_gone.py",
    "build/lib/driftlens-demo/spec.yaml",
    "build/site/index.html",
    "dist/driftlens-0.0.1-py3-none-any.whl",
    ".venv/lib/python3.11/site-packages/driftlens/__init__.py",
    ".cache/driftlens/suite.json",
    "driftlens/__pycache__/api.cpython-311.pyc",
    "driftlens/notes.txt",
]


def tracked() -> list[str]:
    """Files of the working tree that git does not ignore, as far as building reads them or might."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file() and not name.startswith("docs/")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel of a clone in which somebody has worked."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("built")
    for name in [*tracked(), *LEFTOVERS]:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if name in LEFTOVERS:
            (clone / name).write_text("left over\n" if not name.endswith(".py") else "")
        else:
            shutil.copyfile(ROOT / name, clone / name)
    noted = clone / "driftlens.egg-info" / "SOURCES.txt"  # of a build that took too much
    noted.parent.mkdir()
    noted.write_text("\n".join([*LEFTOVERS, "tests/__init__.py", "driftlens/__init__.py"]))
    (clone / "run").symlink_to(clone / "driftlens-demo")
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=clone, check=True, capture_output=True)
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def test_a_wheel_holds_the_packages_files_and_no_other(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    information = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    wanted = {
        name.removeprefix(f"{folder}/")
        for package, folder in PACKAGES.items()
        for name in tracked()
        if name.startswith(f"{package}/" if folder == "." else f"{folder}/{package}/")
    }
    assert names - information == wanted and len(wanted) > 300
    parts = {name.split("/", 1)[1] for name in information}
    assert parts == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


@pytest.mark.slow
def test_an_sdist_holds_what_builds_that_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
        archive.extractall(tmp_path, filter="data")
    beside = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    made = {"PKG-INFO", "setup.cfg", "driftlens.egg-info/SOURCES.txt"}
    code = {
        name for name in tracked() if name.startswith(("driftlens/", "reports/driftlens_", "app/driftlens_"))
    }
    assert names == code | beside | made
    [source] = tmp_path.iterdir()
    (again := tmp_path / "again").mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(again)], cwd=source, check=True, capture_output=True)
    files = [zipfile.ZipFile(path).namelist() for path in (wheel, again / wheel.name)]
    assert sorted(files[0]) == sorted(files[1])


@pytest.mark.slow
def test_the_wheel_alone_is_enough(built: tuple[Path, Path], world: World, tmp_path: Path) -> None:
    """In an environment of its own, which borrows what driftlens needs, and from a folder that is not the clone."""
    home, elsewhere = tmp_path / "environment", tmp_path / "elsewhere"
    elsewhere.mkdir()
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    [packages] = home.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(built[1])]
    subprocess.run(install, check=True, capture_output=True)
    variables = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DRIFTLENS"))
    }

    def driftlens(*arguments: str) -> str:
        command = [str(home / "bin" / "driftlens"), *arguments]
        done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert dl.__version__ in driftlens("--version")
    assert "--suite" in driftlens("demo", "--help")
    where = "import driftlens, driftlens_app, driftlens_reports as r; print(driftlens.__file__, r.__file__)"
    said = subprocess.run([python, "-c", where], cwd=elsewhere, env=variables, capture_output=True, text=True)
    assert said.stdout.count(str(packages)) == 2, said.stderr
    driftlens("init", "--template", "generic", "--out", "template.yaml")
    write_spec(elsewhere / "run.yaml", world.one_task(metrics={"jacobian": False}))
    assert "merged" in driftlens("analyze", "run.yaml", "--out", "run", "--progress", "none")
    driftlens("report", "run", "--format", "html,html-light,json")
    driftlens("ui", "--help")
