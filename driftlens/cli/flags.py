"""Flags made of the fields of a request: a command names its request and its job, and takes each as one argument.

@app.command()
@flagged
def sweep(run: RunFolder, request: SweepRequest, job: Job, as_json: JsonFlag = False) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import annotated_types
import typer
from pydantic.fields import FieldInfo

from driftlens.cli.app import Job
from driftlens.spec.requests import Option, Request

Command = Callable[..., None]
Maker = Callable[[Mapping[str, Any]], Any]
"""Makes an argument of a command out of the values of its flags."""


def flagged(command: Command) -> Command:
    """The command with a flag per field where it takes a request, and per option where it takes a `Job`.

    `Annotated[Job, "device", "progress"]` has only these of its options.
    """
    parameters: dict[str, inspect.Parameter] = {}
    own: dict[str, inspect.Parameter] = {}
    made_of: dict[str, Maker] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, *names = typing.get_args(parameter.annotation) or [parameter.annotation]
        if inspect.isclass(kind) and issubclass(kind, Request):
            flags = {flag.name: flag for flag in request_flags(kind)}
            made_of[parameter.name] = functools.partial(_request, kind)
        elif kind is Job:
            options = inspect.signature(Job, eval_str=True).parameters
            flags = {name: options[name] for name in names or options}
            made_of[parameter.name] = functools.partial(_job, [*flags])
        else:
            own[parameter.name] = parameter
            flags = {parameter.name: parameter}
        parameters = {**parameters, **flags}

    def run(**given: Any) -> None:
        made = {name: make(given) for name, make in made_of.items()}
        command(**{name: given[name] for name in own}, **made)

    functools.update_wrapper(run, command)
    # What typer reads: the signature, then annotations by name.
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters.values()]
    vars(run)["__signature__"] = inspect.Signature(keywords)
    run.__annotations__ = {each.name: each.annotation for each in keywords}
    return run


def _job(names: list[str], given: Mapping[str, Any]) -> Job:
    return Job(**{name: given[name] for name in names})


def _request(kind: type[Request], given: Mapping[str, Any]) -> Request:
    """The request that flags ask for; what is left out has its default."""
    said = {name: value for name in kind.short if (value := given[name]) is not None}
    for name, field in kind.model_fields.items():
        option = Option.of(field)
        value = given[option.parameter or name] if option.is_given else None
        if value is None:
            continue
        if option.read is not None:
            value = option.read(value)
        said[name] = value is False if field.default is True else value
    return kind(**said)


def request_flags(kind: type[Request]) -> Iterator[inspect.Parameter]:
    """The flags of a request, as parameters that typer understands."""
    for name, field in kind.model_fields.items():
        option = Option.of(field)
        if name == "parameters":
            yield from (
                _flag(short, float | None, None, typer.Option(help=help_text))
                for short, help_text in kind.short.items()
            )
        if option.is_given:
            yield _field_flag(name, field, option)


def _field_flag(name: str, field: FieldInfo, option: Option) -> inspect.Parameter:
    about: dict[str, Any] = {"help": field.description, "metavar": option.metavar}
    about |= {"show_default": option.unset} if option.unset else {}
    spelled, default = option.name, field.get_default(call_default_factory=True)
    words = list[str] if option.is_list else str
    value = words if option.read is not None else _value_of(field.annotation)
    if value is bool:
        # Named, it gets no second flag that switches it off; one that is on is switched off by its flag.
        spelled, default = spelled or f"--{name.replace('_', '-')}", False
    if value in (int, float):
        bounds = [*_bounds(field.annotation, field.metadata)]
        about["min"] = next((each.ge for each in bounds if isinstance(each, annotated_types.Ge)), None)
        about["max"] = next((each.le for each in bounds if isinstance(each, annotated_types.Le)), None)
    if field.is_required():
        default = inspect.Parameter.empty
    elif default is None or option.read is not None or value == list[str]:
        value, default = value | None, None
    declared = typer.Option(*[spelled] if spelled else [], **about)
    return _flag(option.parameter or name, value, default, declared)


def _flag(name: str, value: Any, default: Any, option: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[value, option])


def _value_of(annotation: Any) -> Any:
    """The type of a flag's value: without metadata, `None` beside it, and tuples as lists of words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _value_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _value_of(next(each for each in arguments if each is not type(None)))
    if annotation is Any:  # words that are checked where they are read
        return str
    return list[str] if origin is tuple else annotation


def _bounds(annotation: Any, metadata: Any) -> Iterator[Any]:
    """What an annotation says of least and greatest numbers."""
    for each in metadata:
        if isinstance(each, annotated_types.Ge | annotated_types.Le):
            yield each
        yield from _bounds(None, getattr(each, "metadata", ()))
    for each in typing.get_args(annotation):
        yield from _bounds(each, getattr(each, "__metadata__", ()))
