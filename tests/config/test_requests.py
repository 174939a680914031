"""Requests: flags and keywords are made of their fields, and say the same as these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import driftlens as dl
from driftlens.cli.flags import add_request_flags
from driftlens.config.requests import (
    AnalysisRequest,
    CalibrationRequest,
    ComparisonRequest,
    ExportRequest,
    PreflightRequest,
    Request,
    SweepRequest,
)
from driftlens.utils.errors import SpecError

SAID = [
    CalibrationRequest(name="x"),
    SweepRequest(),
    CalibrationRequest(
        name="x",
        method="featcal",
        preset="paper-clip",
        parameters={"lam": 0.5, "update": ["linear", "norm"], "anchor": "none"},
        samples=3,
        layers=[2, "*.mlp"],
        sites=["q", "*.k"],
        save_weights=Path("out"),
        save_adapter=Path("lora"),
        rank=4,
        resume=True,
        attribution=False,
    ),
    SweepRequest(samples=5, methods=["featcal", "residual"], resume=True),
    SweepRequest(methods=["featcal", ("surgery", {"rank": 4})]),
    ComparisonRequest(merges=["average", ("ties", {"scaling": 0.4})]),
    AnalysisRequest(out="runs/x", force=True),
    PreflightRequest(deep=True),
    ExportRequest(tasks=["a", "b"], style="slide", card=True),
]


@pytest.mark.parametrize("request_", SAID, ids=lambda each: type(each).__name__)
def test_its_words_on_the_command_line_ask_for_the_same(request_: Request) -> None:
    heard: list[Request] = []

    def command(request: Any) -> None:
        heard.append(request)

    command.__annotations__["request"] = type(request_)
    app = typer.Typer()
    app.command()(add_request_flags(command))
    typer.main.get_command(app).main(request_.to_cli_args(), standalone_mode=False)  # defaults are left out
    assert heard == [request_]


@pytest.mark.parametrize(
    ("function", "misspelt", "meant"),
    [
        (dl.analyze, "attribtion", "attribution"),
        (dl.analyze, "baselins", "baselines"),
        (dl.calibrate, "presett", "preset"),
        (dl.sweep, "sampels", "samples"),
        (dl.merge, "methd", "method"),
        (dl.compare_merges, "mergs", "merges"),
        (dl.validate, "devise", "device"),
        (dl.project, "max_point", "max_points"),
        (dl.paper.figure, "stile", "style"),
        (dl.FeatCal.fit, "batchsize", "batch_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_an_unknown_keyword_ends_with_the_one_that_was_meant(
    function: Callable[..., object], misspelt: str, meant: str
) -> None:
    with pytest.raises(SpecError, match=f"has no '{misspelt}'; it takes ") as refused:
        function("x", **{misspelt: 1})
    assert refused.value.hint == f"Did you mean '{meant}'?"
    assert meant in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"samples": 0}, "samples: Input should be greater"),
        ({"samples": True}, "samples: Input should be a valid integer, got True"),
        ({"layers": "*.mlp"}, "layers: Input should be a valid tuple"),
        ({"resume": "yes"}, "resume: Input should be a valid boolean"),
        ({"name": None}, "name: Input should be a valid string"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        CalibrationRequest(**{"name": "x", **values})


def test_a_run_is_gone_on_with_or_replaced() -> None:
    with pytest.raises(SpecError, match="`resume` continues an existing run, `force` replaces it"):
        AnalysisRequest(resume=True, force=True)


def test_an_earlier_keyword_is_accepted_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="shrink is now called interpolate"):
        assert CalibrationRequest(name="x", shrink=0.5).interpolate == 0.5  # type: ignore[call-arg]
