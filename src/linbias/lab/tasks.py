# SPDX-License-Identifier: Apache-2.0
"""Running tasks one after the other or side by side in processes, and stopping them on request."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from .progress import Interrupted, Progress, Tell

_POLL_SECONDS = 0.2
_LAST_SECONDS = 10.0


class WorkerDied(RuntimeError):
    """A worker process ended without saying why."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A piece of work; it must be picklable to run in another process."""

    name: str
    cost: float = 1.0
    """Expected work, in any unit common to all tasks: decides what part of the whole progress bar it is."""
    after: str | None = None
    """Name of the task that must be done first; it stands earlier in the list."""
    work: Callable[[Tell], str | None]
    """Returns what to tell at its end, if anything."""


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_tasks(title: str, tasks: Sequence[Task], workers: int = 1) -> None:
    """Run every task: one after the other in this process, or in `workers` processes that share the cores.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came; tasks under way saved how far they were.
        WorkerDied: a process was killed, by lack of memory perhaps.
        Exception: that of a task, with a note that names the task.
    """
    with Progress(title, {task.name: task.cost for task in tasks}) as progress, stop_on_signals() as stop:
        try:
            if workers > 1:
                _Pool(tasks, workers, progress).run(stop)
                return
            for task in tasks:
                with _named(task.name):
                    said = task.work(_telling(task.name, progress.advance, lambda: stop.raised))
                progress.finish(task.name)
                if said is not None:
                    progress.say(said)
        except Interrupted as stopped:
            stopped.signum = stop.signum
            raise


class StopFlag:
    """True once the process was asked to stop."""

    def __init__(self) -> None:
        self.raised = False
        self.signum: int = signal.SIGINT


@contextmanager
def stop_on_signals() -> Generator[StopFlag]:
    """Turn Ctrl-C and SIGTERM into a flag for the time of a `with` block; a second Ctrl-C ends the process at once."""
    flag = StopFlag()

    def handle(signum: int, frame: FrameType | None) -> None:
        if flag.raised and signum == signal.SIGINT:
            raise KeyboardInterrupt
        flag.raised, flag.signum = True, signum

    previous = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _telling(name: str, listener: Callable[[str, float, str], object], should_stop: Callable[[], bool]) -> Tell:
    def tell(fraction: float, note: str) -> None:
        listener(name, fraction, note)
        if fraction < 1 and should_stop():
            raise Interrupted(f"{name}: stopped")

    return tell


@contextmanager
def _named(name: str) -> Generator[None]:
    """Errors say which task they come from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the task: {name}")
        raise


class _Pool:
    """Tasks under way in several processes."""

    def __init__(self, tasks: Sequence[Task], workers: int, progress: Progress) -> None:
        # Not forked: a copy of a process whose torch already runs threads may hang.
        context = multiprocessing.get_context("spawn")
        self._told: Any = context.Queue()
        self._stop = context.Event()
        self._progress = progress
        self._waiting = list(tasks)
        self._running: dict[Future[str | None], str] = {}
        shared = (self._told, self._stop, max(1, usable_cores() // workers))
        self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=shared)

    def run(self, stop: StopFlag) -> None:
        """Run all tasks to their end, or until `stop` is raised."""
        try:
            self._submit(after=None)
            while self._running:
                done, _ = wait(self._running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                self._show()
                if stop.raised and not self._stop.is_set():
                    self._stop.set()
                    self._progress.say("stopping: saving what is under way")
                for future in done:
                    self._settle(future, stop)
        except BrokenProcessPool as error:
            raise WorkerDied(
                "a worker process died, perhaps for lack of memory; the same command goes on where it was, "
                "with --workers 1 in less memory"
            ) from error
        finally:
            # An error in one task ends the others too, and they save.
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)
            self._show()
        if stop.raised:
            raise Interrupted("stopped; what was done is saved")

    def _submit(self, after: str | None) -> None:
        for task in [task for task in self._waiting if task.after == after]:
            self._waiting.remove(task)
            self._running[self._pool.submit(_perform, task)] = task.name

    def _settle(self, future: "Future[str | None]", stop: StopFlag) -> None:
        name = self._running.pop(future)
        try:
            with _named(name):
                said = future.result()
        except Interrupted:
            return
        self._progress.finish(name)
        if said is not None:
            self._progress.say(said)
        if not stop.raised:
            self._submit(after=name)

    def _show(self) -> None:
        while True:
            try:
                self._progress.advance(*self._told.get_nowait())
            except queue.Empty:
                return


_worker: tuple[Any, Any] | None = None
"""What a worker process was given at its start: the queue it tells its progress, and the event that stops it."""


def _start_worker(told: Any, stop: Any, threads: int) -> None:
    global _worker  # noqa: PLW0603
    # A global is the only way an executor has to give a process its own state. Ctrl-C reaches every process of a
    # terminal; only the parent decides, and tells the others to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # SIGTERM may be sent to all processes of a job, and must let each of them save. What it sets takes a lock, and so
    # happens in a thread.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=_end_soon, args=(stop,), daemon=True).start())
    torch.set_num_threads(threads)
    _worker = told, stop
    threading.Thread(target=_outlive_briefly, args=(stop,), daemon=True).start()


def _outlive_briefly(stop: Any) -> None:
    """Once the parent was killed outright, let the task save, then end: nobody is left to use its result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    _end_soon(stop)


def _end_soon(stop: Any) -> None:
    stop.set()
    time.sleep(_LAST_SECONDS)
    os._exit(1)


def _perform(task: Task) -> str | None:
    assert _worker is not None
    told, stop = _worker
    if stop.is_set():
        raise Interrupted(f"{task.name}: not started")
    return task.work(_telling(task.name, lambda *news: told.put(news), stop.is_set))
