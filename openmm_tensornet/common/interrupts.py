"""Exceptions that Python code raises inside OpenMM's C++ code, delivered to the user as what they are.

A signal's handler runs in whatever Python code comes next, and during a long `integrator.step` or a minimisation that is one of
our operators or forces. TorchScript and OpenMM turn its exception (KeyboardInterrupt, or what the user's handler raises) into an
OpenMMException with a text. Python makes that one as the last of all, and then the first one is raised in its place.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

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


class Entry(threading.local):
    """What C++ calls in place of `callback()`, a function of one argument, so that every exception in it is noticed.

    Python runs the handlers of signals where a function begins, before any `try` of its own. A generator has begun already, and its
    `send`, which is C, continues inside of the `try`. There is one for each thread, since threads may call at the same time.

    Attributes
    ----------
    send : callable
        With the argument, returns the result.
    """

    def __init__(self, callback: Callable[[], Any]):
        answers = self._answers(callback)
        next(answers)
        self.send = answers.send

    def _answers(self, callback: Callable[[], Any]) -> Generator:
        answer: Any = None
        try:
            while True:
                argument = yield answer
                _raised.clear()
                answer = callback()(argument)
        except GeneratorExit:
            return
        except BaseException as raised:  # of which OpenMM keeps the text alone, by which its exception is known
            error = raised
            # OpenMM makes vectors in C++, one after another: what a handler raises in one makes a SystemError in the next.
            while isinstance(error, SystemError) and error.__cause__ is not None:
                error = error.__cause__
            _raised.append(error)
            self.__init__(callback)  # type: ignore[misc]  # a generator that raises has ended
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def translate(kind: type[Exception]) -> None:
    """Let OpenMM's exception, `kind`, give way to that of a callback of which it speaks; once in a process."""

    def __init__(self: Exception, *texts: Any) -> None:
        first = _first(str(texts[0]) if texts else "")
        if first is not None:
            raise first
        Exception.__init__(self, *texts)

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]


@contextmanager
def delivered() -> Iterator[None]:
    """Raise what Python code raised inside TorchScript that is called here, in place of TorchScript's error."""
    try:
        yield
    except RuntimeError as error:
        first = _first(str(error)) if str(error) else None  # TorchScript's errors have a text
        if first is None:
            raise
        raise first from error


def undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in a thread of its own, and so without handlers of signals, which Python runs in the main thread alone.

    For TorchScript on tensors without values, which often forgets what a handler raised in it.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return apart(function, *args, **kwargs)

    return run


def apart(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in a thread of its own, of which nothing is left afterwards.

    For Python a thread is over some 0.3 ms before it is for Linux. If the interpreter ends meanwhile, what PyTorch clears away there
    aborts the process.
    """
    task = ""
    try:
        with ThreadPoolExecutor(1) as thread:
            task = f"/proc/self/task/{thread.submit(threading.get_native_id).result()}"
            return thread.submit(function, *args, **kwargs).result()
    finally:
        end = time.monotonic() + 1
        while os.path.exists(task) and time.monotonic() < end:
            time.sleep(1e-4)


def _first(text: str) -> BaseException | None:
    """The exception of Python code that an error of C++ with this text stands for; None if it is C++'s own."""
    found = re.search(r"RuntimeError: (\w+): ([^\n]*)", text)
    first = _raised[0] if _raised else None
    _raised.clear()
    if first is not None and type(first).__name__ not in text:
        first = None
    # A handler ran before the first line of an operator: all that is left is the text that TorchScript made, if it made one.
    if first is None or (found and type(first) is RuntimeError):
        name = "KeyboardInterrupt" if text == "" else found and found[1]
        for known in _kinds(BaseException):
            if known.__name__ == name:
                error = known.__new__(known)
                error.args = (found[2],) if found and found[2] != "<EMPTY MESSAGE>" else ()
                return error
    return first


def _kinds(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, by which job schedulers end a job, raise KeyboardInterrupt as SIGINT does; a handler that is already there stays."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
