"""Docstrings, messages and docs use standard terms: a word list, and the shape of docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("driftlens", "app", "reports")
MAX_ODD = 1.5
"""Odd words per 1,000 words."""

ODD = re.compile(
    r"\b(whoever|whatever|nobody|somebody|wherever|beside|behind|thereof|kin|tells|told|stands?|lies|lent|lends?|"
    r"waits?|waited|what (?:is|was|it|a|the)|of its own|by itself|by turns|go(?:es)? on|as often|taken? apart|"
    r"looked at|said of|known of|at hand|made of|in its place|nothing else|for good|is none|(?:is|are) of)\b",
    re.IGNORECASE,
)
CLAUSE = re.compile(r"(What|How|Whether|Where|Which|Of|By|As|Who|Whose|When|While)\b")


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def docstrings() -> Iterator[tuple[str, ast.AST, str]]:
    """Yield place, node and text of every docstring."""
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node)
                if text:
                    name = getattr(node, "name", "module")
                    yield f"{path.relative_to(ROOT)}:{name}", node, text


def messages() -> Iterator[tuple[str, str]]:
    """Yield place and text of every string of four or more words that is no docstring."""
    for path, tree in modules():
        prose = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(getattr(node, "body", None), list)
            and node.body  # type: ignore[attr-defined]
            and isinstance(node.body[0], ast.Expr)  # type: ignore[attr-defined]
        }
        for node in ast.walk(tree):
            is_message = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
            if is_message and node.value.count(" ") >= 3:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def pages() -> Iterator[tuple[str, str]]:
    """Yield name and prose of every page of the docs, without code."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```|`[^`]*`", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        yield str(path.relative_to(ROOT)), text


KINDS = {
    "docstrings": lambda: ((place, text) for place, _, text in docstrings()),
    "messages": messages,
    "docs": pages,
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_words_are_rare(kind: str) -> None:
    words, odd = 0, []
    for place, text in KINDS[kind]():
        words += len(text.split())
        odd += [f"{place}: {match}" for match in ODD.findall(text)]
    assert words > 10_000
    assert 1000 * len(odd) / words <= MAX_ODD, "\n".join(odd)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    found = [(place, text) for place, _, text in docstrings()]
    clauses = [f"{place}: {text[:60]}" for place, text in found if CLAUSE.match(text)]
    assert len(clauses) <= 0.03 * len(found), "\n".join(clauses)


def test_public_functions_of_many_parameters_describe_them() -> None:
    many, without = 0, []
    for place, node, text in docstrings():
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        parameters = {a.arg for a in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}
        if len(parameters) >= 3:
            many += 1
            if "Args:" not in text:
                without.append(place)
    assert len(without) <= 0.4 * many, "\n".join(without)
