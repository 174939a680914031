"""README and the pages in `docs/` name files, commands and flags that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import typer

from driftlens.cli import GROUPS, build_app
from tests.runs.full_run import write_full_run
from tests.tutorials import PAGES as TUTORIALS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, Any] = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]


def test_readme_comes_to_the_point() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text[: text.index("## Reference")].split()) <= 500
    for place in re.findall(r"\]\(([^)#]+)", text):
        assert place.startswith("https://") or (ROOT / place).exists(), place
    assert (ROOT / "reports/gallery/morph.gif").stat().st_size < 3_000_000


def test_every_command_has_a_group_and_its_line_there() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    for group, names in GROUPS.items():
        section = page.partition(f"\n## {group}\n")[2].partition("\n## ")[0]
        lines = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        assert re.findall(r"`(\w+)`", " ".join(lines)) == list(names)


def test_functions_that_pages_quote_are_there() -> None:
    quotes = [
        quote for page in PAGES for quote in re.findall(r"<!-- source of ([\w.]+): ([\w, ]+) -->", page.read_text())
    ]
    assert quotes
    for module, names in quotes:
        for name in names.split(", "):
            assert callable(resolve_name(f"{module}:{name}")), (module, name)


def written(page: Path) -> list[list[str]]:
    """Command lines in the fenced blocks of a page, word by word."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines: list[list[str]] = [[]]
    for block in blocks:
        text = block.replace("\\\n", " ").replace("\n", "\n;\n")
        for word in shlex.shlex(text, posix=True, punctuation_chars=True):
            if set(word) <= set("();<>|&"):
                lines.append([])
            else:
                lines[-1].append(word)
    pictured = re.findall(r">(driftlens .*?)<", page.read_text(encoding="utf-8"))
    return [line for line in [*lines, *map(shlex.split, pictured)] if line[:1] == ["driftlens"]]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/assets/commands.svg"], ids=lambda page: page.name)
def test_pages_name_commands_and_flags_that_there_are(page: Path) -> None:
    for _, name, *rest in written(page):
        if name.startswith("-") or name.isupper():
            continue
        assert name in COMMANDS, (name, rest)
        flags = {flag for param in COMMANDS[name].params for flag in (*param.opts, *param.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= flags | {"-q", "-v", "--quiet", "--verbose", "--debug"}, (name, rest)


BLOCKS = [
    (page, code)
    for page in PAGES
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    # tests/pipelines/test_live_scores.py runs the page on live modules, tests/test_tutorials.py the tutorials.
    if "open_run(" in code and page.stem != "live" and page not in TUTORIALS.values()
]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=[page.stem for page, _ in BLOCKS])
def test_python_that_opens_a_run_runs(page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in re.findall(r'open_run\("(.*?)"\)', code):
        Path(folder).parent.mkdir(exist_ok=True)
        write_full_run(Path(folder))
    exec(compile(code, str(page), "exec"), {})
