"""Flags derived from the fields of requests. A module of its own, since requests take long to import."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from driftlens.cli.app import JobOptions
from driftlens.config import requests
from driftlens.config.requests import Option, Request
from driftlens.utils.errors import SpecError


def add_request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag per field of its `Request` and of its `JobOptions`."""
    parameters: dict[str, inspect.Parameter] = {}
    # Functions that build the command's arguments from the values of flags.
    makers: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
    # Modules of commands import requests for type checkers only.
    signature = inspect.signature(command, eval_str=True, locals=vars(requests))
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if inspect.isclass(kind) and issubclass(kind, Request):
            parameters |= {flag.name: flag for flag in _request_flag_parameters(kind)}
            makers[name] = functools.partial(_request_from_flags, kind)
        elif kind is JobOptions:
            parameters |= inspect.signature(JobOptions, eval_str=True).parameters
            makers[name] = lambda values: JobOptions(values["device"], values["trust"])
        else:
            parameters[name] = parameter
            makers[name] = operator.itemgetter(name)

    def call_with_flags(**values: Any) -> None:
        command(**{name: make(values) for name, make in makers.items()})

    functools.update_wrapper(call_with_flags, command)
    # Typer reads the signature first and then the annotations by name.
    keywords = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in parameters.values()]
    vars(call_with_flags)["__signature__"] = inspect.Signature(keywords)
    call_with_flags.__annotations__ = {flag.name: flag.annotation for flag in keywords}
    return call_with_flags


def _request_from_flags(kind: type[Request], values: Mapping[str, Any]) -> Request:
    """Build a request from the values of flags; missing fields get their defaults."""
    fields_set = {}
    for name, field in kind.model_fields.items():
        option = Option.from_field(field)
        value = values.get(option.parameter or name)
        if value is None:
            continue
        if option.read is not None:
            value = option.read(value)
        # A field that is on by default has a `--no-...` flag, so its value is inverted.
        fields_set[name] = value is False if field.default is True else value
    try:
        return kind(**fields_set)
    except SpecError as error:
        raise _name_flags(error, kind) from None


def _name_flags(error: SpecError, kind: type[Request]) -> SpecError:
    """Return an error about fields of a request with the names of their flags."""
    flags = {name: Option.from_field(field).flag_name(name) for name, field in kind.model_fields.items()}
    message = error.message
    # A problem begins with the path of its field.
    for problem in error.context.get("problems", ()):
        name = re.split("[.:]", problem)[0]
        message = message.replace(problem, flags.get(name, name) + problem.removeprefix(name))
    message, hint = (
        re.sub(r"`(\w+)`", lambda found: flags.get(found[1], found[0]), text) for text in (message, error.hint)
    )
    return SpecError(message, hint=hint)


def _request_flag_parameters(kind: type[Request]) -> Iterator[inspect.Parameter]:
    for name, field in kind.model_fields.items():
        option = Option.from_field(field)
        if not field.description:
            continue
        about: dict[str, Any] = {"help": field.description, "metavar": option.metavar}
        about |= {"show_default": option.unset} if option.unset else {}
        spelled, default = option.name, field.get_default(call_default_factory=True)
        words = list[str] if option.is_list else str
        value: Any = words if option.read is not None else _flag_value_type(field.annotation)
        if value is bool:
            # Typer adds a `--no-` twin to unnamed booleans; a named one has a single flag.
            spelled, default = spelled or option.flag_name(name), False
        if field.is_required():
            default = inspect.Parameter.empty
        elif default is None or option.read is not None or value == list[str]:
            value, default = value | None, None
        flag = Annotated[value, typer.Option(*spelled.split(), **about)]
        place = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(option.parameter or name, place, default=default, annotation=flag)


def _flag_value_type(annotation: Any) -> Any:
    """Return the type of a flag's value from an annotation: no metadata, no None, lists for tuples."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _flag_value_type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return _flag_value_type(next(member for member in arguments if member is not type(None)))
    # Values without a type are parsed later, by `Option.read` or by the request.
    if annotation is Any:
        return str
    return list[str] if origin is tuple else annotation
