"""The public functions are typed: no annotation of theirs has Any in it."""

import inspect
import typing

import pytest
from numpy.typing import ArrayLike

import jshadow

FUNCTIONS = {name: value for name in jshadow.__all__ if inspect.isfunction(value := getattr(jshadow, name))}
ALLOWED = set(typing.get_args(ArrayLike))  # numpy's own alias has Any inside


def mentions_any(hint: object) -> bool:
    """Whether a type is Any, or has Any among its parts; an annotation that is missing counts too."""
    if hint is typing.Any or hint is inspect.Parameter.empty:
        return True
    if isinstance(hint, list):  # the parameters of a Callable
        return any(map(mentions_any, hint))
    if hint in ALLOWED:
        return False
    if isinstance(hint, type) and typing.is_typeddict(hint):
        return any(map(mentions_any, typing.get_type_hints(hint).values()))
    return typing.get_origin(hint) is not typing.Literal and any(map(mentions_any, typing.get_args(hint)))


def test_the_face_has_its_functions():
    assert {
        "generate",
        "stream",
        "load",
        "save",
        "prefill",
        "prefill_many",
        "extend",
        "decode_step",
        "decode_steps",
        "save_state",
        "load_state",
        "save_fitted",
        "load_fitted",
    } <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_public_function_has_any_in_its_types(name):
    for function in (FUNCTIONS[name], *typing.get_overloads(FUNCTIONS[name])):
        hints = typing.get_type_hints(function)
        wrong = [part for part in inspect.signature(function).parameters if mentions_any(hints.get(part, typing.Any))]
        assert not wrong, wrong
        assert not mentions_any(hints.get("return", typing.Any)), "return"


@pytest.mark.parametrize("hint", [typing.Any, list[typing.Any], dict[str, int | list[typing.Any]], typing.Any | None])
def test_any_is_found(hint):
    assert mentions_any(hint)
    assert not mentions_any(list[int] | ArrayLike)
