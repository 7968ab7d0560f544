# SPDX-License-Identifier: Apache-2.0
"""Running pieces of work side by side, showing how far they are, and stopping them on request."""

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

import torch

from .display import Display
from .monitor import Interrupted, Monitor, StopFlag, stop_on_signals

_POLL_SECONDS = 0.2
_LAST_SECONDS = 10.0


class WorkerDied(RuntimeError):
    """A worker process ended without saying why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A piece of work; it must be picklable to run in another process."""

    name: str
    cost: float
    """Expected work, in any unit common to all jobs: decides what part of the whole progress bar it is."""
    after: str | None = None
    """Name of the job that must be done first; it stands earlier in the list."""
    work: Callable[[Monitor], object]


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], workers: int, display: Display) -> None:
    """Run every job: one after the other in this process, or in `workers` processes that share the cores.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came; jobs under way saved how far they were.
        WorkerDied: a process was killed, by lack of memory perhaps.
    """
    with stop_on_signals() as stop:
        if workers == 1:
            for job in jobs:
                job.work(_Here(job, display, stop))
                display.finish(job.name, job.cost)
        else:
            _Pool(jobs, workers, display).run(stop)


class _Here:
    """Monitor of work in this process."""

    def __init__(self, job: Job, display: Display, stop: StopFlag) -> None:
        self._job, self._display, self._stop = job, display, stop

    def resume(self, fraction: float) -> None:
        self._display.resume(self._job.name, self._job.cost, fraction)

    def advance(self, fraction: float, note: str) -> None:
        self._display.advance(self._job.name, self._job.cost, fraction, note)

    def should_stop(self) -> bool:
        return self._stop.raised


class _Pool:
    """Jobs under way in several processes."""

    def __init__(self, jobs: Sequence[Job], workers: int, display: Display) -> None:
        # Not forked: a copy of a process whose torch already runs threads may hang.
        context = multiprocessing.get_context("spawn")
        self._events: Any = context.Queue()
        self._stop = context.Event()
        self._display = display
        self._costs = {job.name: job.cost for job in jobs}
        self._waiting = list(jobs)
        self._running: dict[Future[None], str] = {}
        threads = max(1, usable_cores() // workers)
        self._pool = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(self._events, self._stop, threads)
        )

    def run(self, stop: StopFlag) -> None:
        """Run all jobs to their end, or until `stop` is raised."""
        try:
            self._submit(after=None)
            while self._running:
                done, _ = wait(self._running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                self._show_events()
                if stop.raised and not self._stop.is_set():
                    self._stop.set()
                    self._display.say("stopping: saving what is under way")
                for future in done:
                    self._settle(future, stop)
        except BrokenProcessPool as error:
            raise WorkerDied(
                "a worker process died, perhaps for lack of memory; the same command goes on where it was, "
                "with --workers 1 in less memory"
            ) from error
        finally:
            # An error in one job ends the others too, and they save.
            self._stop.set()
            self._pool.shutdown(cancel_futures=True)
            self._show_events()
        if stop.raised:
            raise Interrupted("stopped; what was done is saved")

    def _submit(self, after: str | None) -> None:
        ready = [job for job in self._waiting if job.after == after]
        for job in ready:
            self._waiting.remove(job)
            self._running[self._pool.submit(_perform, job)] = job.name

    def _settle(self, future: "Future[None]", stop: StopFlag) -> None:
        name = self._running.pop(future)
        try:
            future.result()
        except Interrupted:
            return
        self._display.finish(name, self._costs[name])
        if not stop.raised:
            self._submit(after=name)

    def _show_events(self) -> None:
        while True:
            try:
                name, fraction, note = self._events.get_nowait()
            except queue.Empty:
                return
            if note is None:
                self._display.resume(name, self._costs[name], fraction)
            else:
                self._display.advance(name, self._costs[name], fraction, note)


_worker: "_There | None" = None


class _There:
    """What a worker process was given at its start; also the monitor of its current job."""

    def __init__(self, events: Any, stop: Event) -> None:
        self._events, self._stop = events, stop
        self.name = ""

    def resume(self, fraction: float) -> None:
        self._events.put((self.name, fraction, None))

    def advance(self, fraction: float, note: str) -> None:
        self._events.put((self.name, fraction, note))

    def should_stop(self) -> bool:
        return self._stop.is_set()


def _start_worker(events: Any, stop: Event, threads: int) -> None:
    global _worker  # noqa: PLW0603
    # A global is the only way an executor has to give a process its own state. Ctrl-C reaches every process of a
    # terminal; only the parent decides, and tells the others to save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    _worker = _There(events, stop)
    threading.Thread(target=_outlive_briefly, args=(stop,), daemon=True).start()


def _outlive_briefly(stop: Event) -> None:
    """Once the parent was killed outright, let the job save, then end: nobody is left to use its result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    stop.set()
    time.sleep(_LAST_SECONDS)
    os._exit(1)


def _perform(job: Job) -> None:
    assert _worker is not None
    if _worker.should_stop():
        raise Interrupted(f"{job.name}: not started")
    _worker.name = job.name
    job.work(_worker)
