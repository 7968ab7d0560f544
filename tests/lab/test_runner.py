# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from linbias.lab.monitor import Interrupted
from linbias.lab.runner import Job, WorkerDied, run_jobs


class Told:
    """A display that keeps what it hears."""

    def __init__(self, on_advance=lambda: None):
        self.events, self.on_advance = [], on_advance

    def resume(self, name, cost, fraction):
        self.events.append(("resume", name, fraction))

    def advance(self, name, cost, fraction, note):
        self.events.append(("advance", name, fraction))
        self.on_advance()

    def finish(self, name, cost):
        self.events.append(("finish", name))

    def say(self, text):
        self.events.append(("say", text))

    def close(self):
        pass


def work(folder, name, needs, monitor):
    """Leave a file behind, if what came before left its own."""
    assert needs is None or (folder / needs).exists()
    monitor.resume(0.0)
    monitor.advance(1.0, "done")
    (folder / name).write_text(str(os.getpid()))


def wait_for_stop(folder, name, monitor):
    monitor.resume(0.0)
    monitor.advance(0.5, "waiting")
    while not monitor.should_stop():
        pass
    (folder / name).write_text("saved")
    raise Interrupted(name)


def fail(monitor):
    raise ArithmeticError("out of luck")


def die(monitor):
    os._exit(1)


def job(folder, name, needs=None):
    return Job(name=name, cost=1.0, after=needs, work=partial(work, folder, name, needs))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_jobs_wait_for_what_they_need(tmp_path, workers):
    told = Told()
    run_jobs([job(tmp_path, "a"), job(tmp_path, "b"), job(tmp_path, "c", "a"), job(tmp_path, "d", "c")], workers, told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]
    assert {event[1] for event in told.events if event[0] == "finish"} == {"a", "b", "c", "d"}
    assert ("advance", "d", 1.0) in told.events
    assert any(path.read_text() == str(os.getpid()) for path in tmp_path.iterdir()) == (workers == 1)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_signal_lets_jobs_save_and_starts_no_others(tmp_path, workers, signum):
    sent = []

    def send():
        if not sent:
            sent.append(signum)
            os.kill(os.getpid(), signum)

    jobs = [
        Job(name="slow", cost=1.0, work=partial(wait_for_stop, tmp_path, "slow")),
        job(tmp_path, "next", "slow"),
    ]
    handler = signal.getsignal(signum)
    with pytest.raises(Interrupted):
        run_jobs(jobs, workers, Told(on_advance=send))
    assert [path.name for path in tmp_path.iterdir()] == ["slow"]
    assert signal.getsignal(signum) is handler


@pytest.mark.slow
def test_an_error_in_one_process_is_raised_and_the_others_save(tmp_path):
    jobs = [
        Job(name="slow", cost=1.0, work=partial(wait_for_stop, tmp_path, "slow")),
        Job(name="bad", cost=1.0, work=fail),
    ]
    with pytest.raises(ArithmeticError, match="out of luck"):
        run_jobs(jobs, 2, Told())
    assert (tmp_path / "slow").read_text() == "saved"


@pytest.mark.slow
def test_jobs_save_when_the_parent_is_killed(tmp_path):
    code = (
        "from functools import partial; from pathlib import Path; import sys\n"
        "from linbias.lab.runner import Job, run_jobs\n"
        "from tests.lab.test_runner import Told, wait_for_stop\n"
        "if __name__ == '__main__':\n"
        "    names = 'one', 'two'\n"
        "    jobs = [Job(name=n, cost=1.0, work=partial(wait_for_stop, Path(sys.argv[1]), n)) for n in names]\n"
        "    run_jobs(jobs, 2, Told(on_advance=lambda: print('working', flush=True)))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, str(script), str(tmp_path / "out")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert [parent.stdout.readline() for _ in range(2)] == ["working\n"] * 2
        parent.kill()
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "out").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one", "two"]


@pytest.mark.slow
def test_a_process_that_dies_is_told_with_the_way_out():
    with pytest.raises(WorkerDied, match="--workers 1"):
        run_jobs([Job(name="doomed", cost=1.0, work=die), Job(name="other", cost=1.0, work=die)], 2, Told())
