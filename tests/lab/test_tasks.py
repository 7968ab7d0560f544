# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from linbias.lab import tasks
from linbias.lab.progress import Interrupted
from linbias.lab.tasks import Task, WorkerDied, run_tasks


class Told:
    """A Progress that keeps what it hears."""

    def __init__(self, title, costs):
        self.costs = costs

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def advance(self, name, fraction, note=""):
        events.append(("advance", name, fraction))
        on_advance()

    def finish(self, name):
        events.append(("finish", name))

    def say(self, text):
        events.append(("say", text))


events = []
on_advance = lambda: None  # noqa: E731


@pytest.fixture(autouse=True)
def told(monkeypatch):
    events.clear()
    monkeypatch.setattr(tasks, "Progress", Told)


def work(folder, name, needs, tell):
    """Leave a file behind, if what came before left its own."""
    assert needs is None or (folder / needs).exists()
    tell(0.0, "")
    tell(1.0, "done")
    (folder / name).write_text(str(os.getpid()))


def wait_for_stop(folder, name, tell):
    try:
        while True:
            tell(0.5, "waiting")
            time.sleep(0.01)
    except Interrupted:
        (folder / name).write_text("saved")
        raise


def begin_and_wait(folder, tell):
    (folder / "began").touch()
    wait_for_stop(folder, "slow", tell)


def fail_once_begun(folder, tell):
    while not (folder / "began").exists():
        time.sleep(0.01)
    raise ArithmeticError("out of luck")


def die(tell):
    os._exit(1)


def task(folder, name, needs=None):
    return Task(name=name, after=needs, work=partial(work, folder, name, needs))


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tasks_wait_for_what_they_need(tmp_path, workers):
    wanted = [task(tmp_path, "a"), task(tmp_path, "b"), task(tmp_path, "c", "a"), task(tmp_path, "d", "c")]
    run_tasks("test", wanted, workers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "d"]
    assert {event[1] for event in events if event[0] == "finish"} == {"a", "b", "c", "d"}
    assert ("advance", "d", 1.0) in events
    assert any(path.read_text() == str(os.getpid()) for path in tmp_path.iterdir()) == (workers == 1)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_signal_lets_tasks_save_and_starts_no_others(tmp_path, workers, signum, monkeypatch):
    sent = []

    def send():
        if not sent:
            sent.append(signum)
            os.kill(os.getpid(), signum)

    wanted = [
        Task(name="slow", work=partial(wait_for_stop, tmp_path, "slow")),
        task(tmp_path, "next", "slow"),
    ]
    monkeypatch.setattr(sys.modules[__name__], "on_advance", send)
    handler = signal.getsignal(signum)
    with pytest.raises(Interrupted) as stopped:
        run_tasks("test", wanted, workers)
    assert [path.name for path in tmp_path.iterdir()] == ["slow"]
    assert signal.getsignal(signum) is handler
    assert stopped.value.signum == signum


@pytest.mark.slow
def test_an_error_in_one_process_is_raised_and_the_others_save(tmp_path):
    wanted = [
        Task(name="slow", work=partial(begin_and_wait, tmp_path)),
        Task(name="bad", work=partial(fail_once_begun, tmp_path)),
    ]
    with pytest.raises(ArithmeticError, match="out of luck") as failed:
        run_tasks("test", wanted, 2)
    assert failed.value.__notes__ == ["in the task: bad"]
    assert (tmp_path / "slow").read_text() == "saved"


@pytest.mark.slow
def test_tasks_save_when_the_parent_is_killed(tmp_path):
    code = (
        "from functools import partial; from pathlib import Path; import sys\n"
        "from linbias.lab import tasks\n"
        "from tests.lab import test_tasks\n"
        "test_tasks.on_advance = lambda: print(len({event[1] for event in test_tasks.events}), flush=True)\n"
        "tasks.Progress = test_tasks.Told\n"
        "if __name__ == '__main__':\n"
        "    names = 'one', 'two'\n"
        "    works = [partial(test_tasks.wait_for_stop, Path(sys.argv[1]), name) for name in names]\n"
        "    wanted = [tasks.Task(name=name, work=work) for name, work in zip(names, works)]\n"
        "    tasks.run_tasks('test', wanted, 2)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "out").mkdir()
    arguments = [sys.executable, str(script), str(tmp_path / "out")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert "2\n" in iter(parent.stdout.readline, "")  # both are under way
        parent.kill()
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "out").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one", "two"]


@pytest.mark.slow
def test_a_process_that_dies_is_told_with_the_way_out():
    with pytest.raises(WorkerDied, match="--workers 1"):
        run_tasks("test", [Task(name="doomed", work=die), Task(name="other", work=die)], 2)
