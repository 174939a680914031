"""A wheel and an sdist hold the package and nothing else, whatever lies about in the clone that they are built in."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import driftlens as dl
from tests.pipelines.fixtures import world
from tests.zoo.world import World, write_spec

__all__ = ["world"]

ROOT = Path(__file__).parents[1]
PACKAGES = {"driftlens": ".", "driftlens_reports": "reports", "driftlens_app": "app"}
BUILD = """
import sys
from setuptools import build_meta
out, *kinds = sys.argv[1:]  # which building changes
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(out)
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
    noted = clone / "driftlens_merge.egg-info" / "SOURCES.txt"  # of a build that took too much
    noted.parent.mkdir()
    noted.write_text("\n".join([*LEFTOVERS, "tests/__init__.py", "driftlens/__init__.py"]))
    (clone / "run").symlink_to(clone / "driftlens-demo")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out), "sdist", "wheel"], cwd=clone, check=True, capture_output=True
    )
    [sdist], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.mark.slow
def test_a_wheel_holds_the_packages_files_and_no_other(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    information = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    wanted = {
        name.removeprefix(f"{folder}/")
        for package, folder in PACKAGES.items()
        for name in tracked()
        if name.startswith(f"{package}/" if folder == "." else f"{folder}/{package}/")
    }
    assert names - information == wanted and len(wanted) > 250
    parts = {name.split("/", 1)[1] for name in information}
    assert parts == {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert built[1].stat().st_size < 40e6


@pytest.mark.slow
@pytest.mark.every
def test_an_sdist_holds_what_builds_that_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
        archive.extractall(tmp_path, filter="data")
    beside = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    made = {"PKG-INFO", "setup.cfg", "driftlens_merge.egg-info/SOURCES.txt"}
    code = {name for name in tracked() if name.startswith(("driftlens/", "reports/driftlens_", "app/driftlens_"))}
    assert names == code | beside | made
    [source] = tmp_path.iterdir()
    (again := tmp_path / "again").mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(again), "wheel"], cwd=source, check=True, capture_output=True)
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
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DRIFTLENS"))}

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


@pytest.mark.slow
def test_the_version_is_that_of_the_git_tag_and_of_commits_since(tmp_path: Path) -> None:
    def said(*command: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = (command[0], *named, *command[1:]) if command[0] == "git" else command
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip().rpartition("\n")[2]

    (tmp_path / "LICENSE").write_text("")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text("")
    for folder in ("reports", "app"):
        (tmp_path / folder).mkdir()
    asked = (sys.executable, "setup.py", "--version")
    assert said(*asked) == "0.1.0"  # of a folder without history
    said("git", "init", "-q")
    said("git", "add", ".")
    said("git", "commit", "-qm", "a")
    assert said(*asked) == "0.1.0"
    said("git", "tag", "v2.3.4")
    assert said(*asked) == "2.3.4"
    said("git", "commit", "-qm", "b", "--allow-empty")
    assert said(*asked) == f"2.3.5.dev1+g{said('git', 'rev-parse', 'HEAD')[:7]}"
    (tmp_path / "PKG-INFO").write_text("Name: driftlens-merge\nVersion: 7.0.0\n")
    assert said(*asked) == "7.0.0"


WITHOUT_A_SERVER = """
import sys
sys.modules.update(dict.fromkeys(("streamlit", "starlette", "playwright", "selenium")))
from driftlens.cli import main
for line in sys.argv[1].splitlines():
    try:
        main(line.split())
    except SystemExit as end:
        assert end.code == 0, line
"""


@pytest.mark.slow
def test_analysis_repair_and_pages_need_neither_streamlit_nor_a_browser(world: World, tmp_path: Path) -> None:
    write_spec(tmp_path / "run.yaml", world.one_task(metrics={"jacobian": False}))
    lines = (
        "analyze run.yaml --out run",
        "calibrate run --name featcal",
        "show run",
        "view run -o page.html",
        "report run",
    )
    arguments = [sys.executable, "-c", WITHOUT_A_SERVER, "\n".join(lines)]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_workflows_call_what_anybody_can_call() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    allowed = {"bash .ci/run", *(f"make {target}" for target in targets)}
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    for file in files:
        jobs = yaml.safe_load(file.read_text())["jobs"].values()
        run = {step["run"] for job in jobs for step in job["steps"] if "run" in step}
        assert run and run <= allowed, file.name
    assert len(files) == 2


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    names = {"torch": "pytorch", "open_clip_torch": "open-clip-torch", "matplotlib": "matplotlib-base"}
    text = re.sub(r"\{%.*?%\}", "", (ROOT / "deploy/conda/meta.yaml").read_text())
    recipe = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", text))
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    needed = [re.match(r"[\w-]+", line) for line in wanted["dependencies"]]
    of = [names.get(at[0], at[0]) + at.string[at.end() :] for at in needed if at]
    assert stated == {*of, f"python{wanted['requires-python']}"}
    assert recipe["package"]["name"] == wanted["name"]


@pytest.mark.parametrize("file", ["deploy/Dockerfile", "deploy/space/Dockerfile"])
def test_images_are_built_of_what_is_there_and_run_as_nobody_special(file: str) -> None:
    """What a linter would say: versions named, lists of packages removed, files there, the last user not root."""
    text = (ROOT / file).read_text()
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    assert {step for step, _ in steps} <= {
        *["ARG", "FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "EXPOSE"]
    }
    assert steps[0][0] in ("ARG", "FROM") and steps[-1][0] == "CMD" and steps[-1][1].startswith("[")
    bases = [rest.replace("${BASE}", steps[0][1].partition("=")[2]) for step, rest in steps if step == "FROM"]
    assert len(bases) == 1 and re.fullmatch(r"[\w./-]+:[\w.-]+", bases[0]) and not bases[0].endswith(":latest")
    assert [rest for step, rest in steps if step == "USER"][-1] not in ("root", "0")
    for step, rest in steps:
        if "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        if "pip install" in rest:
            assert "--no-cache-dir" in rest
        if step == "COPY":
            source = next(part for part in rest.split() if not part.startswith("--"))
            home = ROOT if file == "deploy/Dockerfile" else (ROOT / file).parent
            assert (home / source).exists()


def test_a_space_is_served_under_its_own_name_to_look_at_only() -> None:
    start = (ROOT / "deploy/space/start.py").read_text()
    command = runpy.run_path(str(ROOT / "deploy/space/start.py"))["command"]("me-driftlens.hf.space")
    _, front, _ = (ROOT / "deploy/space/README.md").read_text().split("---\n")
    about = yaml.safe_load(front)
    assert ("--server.allowedHosts", "me-driftlens.hf.space") in [*itertools.pairwise(command)]
    assert str(about["app_port"]) == command[command.index("--server.port") + 1] and about["sdk"] == "docker"
    assert "read_only=True" in start and "EXPOSE 7860" in (ROOT / "deploy/space/Dockerfile").read_text()
