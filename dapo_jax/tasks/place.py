"""The place of an episode: one thread, and in it one event loop, where all its calls run in order.

What an environment opens, as a database's connection, a client's session or a task, belongs to the
thread and the loop that opened it. The loop runs while something is awaited and between calls, so
that tasks go on and servers' pings are answered. Beside a call that is not async no loop runs: it
may run one of its own. Host only: no jax.
"""

import asyncio
import concurrent.futures
import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TIMED_OUT = "no answer within"
FIRST_PAUSE_SECONDS = 0.25
LEAST_TRIES = 3


class Place:
    """Runs calls in a thread of its own, one after the other; no program waits for the thread.

    name: of the thread, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event | None = None
        self._task: asyncio.Task | None = None
        self._last: concurrent.futures.Future | None = None
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @property
    def is_taken(self) -> bool:
        """Returns whether a call that took too long has not come back yet."""
        return self._last is not None and not self._last.done()

    def call(self, function: Callable[[], Any], seconds: float) -> Any:
        """Returns what a call gives, awaited where it is async.

        Raises TimeoutError where it takes too long: an async one is cancelled; the thread of
        another one cannot be ended.
        """
        self._last = job = concurrent.futures.Future()
        self._put((function, job))
        if not concurrent.futures.wait([job], seconds).done:
            if task := self._task:
                self._loop.call_soon_threadsafe(task.cancel)
            raise TimeoutError(f"{TIMED_OUT} {seconds:g} s")
        return job.result()

    def end(self) -> None:
        """Ends the thread behind the calls so far; says so where one of them has not come back."""
        if self.is_taken:
            logging.warning("%s does not come back: its thread is left behind", self._name)
        self._put(None)

    def _put(self, job) -> None:
        self._jobs.put(job)
        if self._loop and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._woken.set)

    def _work(self) -> None:
        while job := self._next():
            run_job(*job, lambda value: self._awaited(value))
        if self._loop:
            self._loop.run_until_complete(self._cancel_tasks())
            self._loop.close()

    def _next(self):
        while self._loop and self._jobs.empty():
            self._loop.run_until_complete(self._wait())
        return self._jobs.get()

    async def _wait(self) -> None:
        await self._woken.wait()
        self._woken.clear()

    def _awaited(self, value: Any) -> Any:
        if not self._loop:
            self._woken, self._loop = asyncio.Event(), asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(_result(value))
        try:
            return self._loop.run_until_complete(self._task)
        finally:
            self._task = None

    async def _cancel_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _result(value: Any) -> Any:
    return await value


def run_job(function: Callable, job: concurrent.futures.Future, awaited: Callable) -> None:
    """Runs a call, and gives a future what it gives or raises; nothing is raised here."""
    try:
        value = function()
        job.set_result(awaited(value) if inspect.isawaitable(value) else value)
    except Exception as error:
        job.set_exception(error)
    except BaseException as error:  # of exit(), which a tool that runs code may be given
        job.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def in_thread(function: Callable[[], Any]) -> concurrent.futures.Future:
    """Begins a call in a thread that no program waits for."""
    job: concurrent.futures.Future = concurrent.futures.Future()
    how = {"name": "episode", "daemon": True, "args": (function, job, asyncio.run)}
    threading.Thread(target=run_job, **how).start()
    return job


def tries(seconds: float) -> Iterator[bool]:
    """Yields for each try whether it is the last; the pauses between them grow.

    There are LEAST_TRIES at least, and more while the next pause ends within so many seconds.
    """
    start, pause, count = time.monotonic(), FIRST_PAUSE_SECONDS, 1
    while count < LEAST_TRIES or time.monotonic() - start + pause < seconds:
        yield False
        time.sleep(min(pause, seconds / LEAST_TRIES))
        pause, count = 2 * pause, count + 1
    yield True
