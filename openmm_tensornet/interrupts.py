"""Exceptions that Python code raises inside OpenMM's C++ code, delivered to the user as what they are.

A signal's handler runs in whatever Python code comes next, and during a long `integrator.step` or a minimisation that is one of
our operators or forces. TorchScript and OpenMM turn its exception (KeyboardInterrupt, or what the user's handler raises) into an
OpenMMException with a text. Python makes that one as the last of all, and then the first one is raised in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

# What the last callback raised, until the next one runs.
_raised: list[BaseException] = []


def deliver(callback: Callable) -> Callable:
    """Wrap what OpenMM calls, so that an exception which it raises reaches the user as it is."""

    @wraps(callback)
    def run(*arguments: Any) -> Any:
        _raised.clear()
        try:
            return callback(*arguments)
        except BaseException as error:
            _raised.append(error)
            raise

    return run


def translate(kind: type[Exception]) -> None:
    """Let OpenMM's exception, `kind`, give way to that of a callback of which it speaks; once in a process."""

    def __init__(self: Exception, *texts: Any) -> None:
        text = str(texts[0]) if texts else ""
        for error in _raised:
            _raised.clear()
            if type(error).__name__ in text:
                raise error
        # A handler that ran before the first line of a callback. All that is left is the text that TorchScript made, if it made one.
        found = re.search(r"RuntimeError: (\w+): ([^\n]*)", text)
        name = "KeyboardInterrupt" if text == "" else found and found[1]
        for known in _kinds(BaseException):
            if known.__name__ == name:
                error = known.__new__(known)
                error.args = (found[2],) if found and found[2] != "<EMPTY MESSAGE>" else ()
                raise error
        Exception.__init__(self, *texts)

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]


def _kinds(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)
