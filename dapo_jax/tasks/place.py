"""The place of an episode: one thread, and in it one event loop, where all its calls run in order.

What an environment opens, as a database's connection, a client's session or a task, belongs to the
thread and the loop that opened it. The loop runs while something is awaited and between calls, so
that tasks go on and servers' pings are answered; it does not beside a call that is not async, which
may run one of its own. Host only: no jax.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

TIMED_OUT = "no answer within"
CANCEL_SECONDS = 1.0  # for what is awaited to come back


class Place:
    """Runs calls in a thread of its own, for which no program waits; name: the thread's."""

    def __init__(self, name: str):
        self._name, self._jobs = name, queue.SimpleQueue()
        self._loop = asyncio.Runner()  # which makes one when it is used
        self._last = Future()
        self._task = self._wake = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def is_taken(self) -> bool:
        """Returns whether the last call has not come back yet: it took too long."""
        return self._last.running()

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """Returns what a call gives, awaited where it is async.

        Raises TimeoutError where it takes too long; what is awaited is then cancelled.
        """
        self._last = job = Future()
        job.set_running_or_notify_cancel()
        self._put((function, job))
        if not concurrent.futures.wait([job], seconds).done:
            if (task := self._task) and not task.done():
                task.get_loop().call_soon_threadsafe(task.cancel)
                concurrent.futures.wait([job], CANCEL_SECONDS)
            raise TimeoutError(f"{TIMED_OUT} {seconds:g} s")
        return job.result()

    def later(self, function: Callable[[], Any]) -> None:
        """Has something called behind the call that has not come back; nobody waits for it."""
        self._put((function, Future()))

    def end(self) -> None:
        """Ends the thread, or says that it is given up."""
        if self.is_taken:
            logging.warning("%s does not come back: its thread is left behind", self._name)
        self._put(None)

    def _put(self, job: tuple | None) -> None:
        self._jobs.put(job)
        if self._wake:
            self._wake()

    def _work(self) -> None:
        context = contextvars.copy_context()  # one for all calls

        def awaited(value):
            return self._loop.run(self._awaited(value), context=context)

        while job := self._next():
            function, result = job
            _run(functools.partial(context.run, function), result, awaited)
        self._wake = None
        self._loop.close()

    def _next(self) -> tuple | None:
        if self._task:  # there may be more in the loop
            with contextlib.suppress(BaseException):  # of a task of the environment's
                self._loop.run(self._until_woken())
        return self._jobs.get()

    async def _awaited(self, value: Any) -> Any:
        self._task = asyncio.current_task()
        return await value

    async def _until_woken(self) -> None:
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        if self._jobs.empty():
            await woken.wait()


def in_thread(function: Callable[[], Any], *, program_waits: bool = False) -> Future:
    """Begins a call in a thread of its own, for which a program waits at its end, or does not."""
    job: Future = Future()
    how = {"args": (function, job, asyncio.run), "daemon": not program_waits}
    threading.Thread(target=_run, name="episode", **how).start()
    return job


def _run(function: Callable, job: Future, awaited: Callable) -> None:
    try:
        value = function()
        job.set_result(awaited(value) if inspect.isawaitable(value) else value)
    except Exception as error:
        job.set_exception(error)
    except BaseException as error:  # of exit(), which a tool that runs code may be given
        job.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
