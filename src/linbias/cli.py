# SPDX-License-Identifier: Apache-2.0
"""The command line: one subcommand for each command class of the workbench."""

import io
import json
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

from . import BackendUnavailable, __version__
from .lab import doctor
from .lab.bench.run import Unfit, bench, write_plot
from .lab.bench.show import describe_bench
from .lab.compare import compare
from .lab.config import (
    BenchCommand,
    CompareCommand,
    ConfigError,
    DoctorCommand,
    InspectCommand,
    TrainCommand,
)
from .lab.data import DataError, printable
from .lab.evaluations.commands import EVALUATIONS
from .lab.evaluations.config import EvaluateCommand
from .lab.evaluations.of_folder import evaluate_folder
from .lab.exports import results_text, set_aside, write_exports
from .lab.extras import MissingExtra, need
from .lab.heads import LENGTH, farthest, heads_table, inspect_heads, layers_of, measured_table
from .lab.measure import measure
from .lab.plots import draw_heads
from .lab.progress import Interrupted
from .lab.single import describe_evaluation, describe_training, evaluate_checkpoint, train_one
from .lab.storage import CheckpointError, write_bytes, write_text
from .lab.tasks import WorkerDied
from .lab.train import Diverged

_SIGNALLED = 128
"""What a shell adds to the number of the signal that ended a program."""
_SIGPIPE = 13
_ERRORS = (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    DataError,
    Diverged,
    MemoryError,
    MissingExtra,
    OSError,
    Unfit,
    WorkerDied,
)
"""What a command may end in that is no fault of the program: told in a line, without a trace."""
_DESCRIPTION = """Attention with linear biases (ALiBi): a workbench for the library.

Start with:
  linbias compare    train five small models on Jane Austen, test them on texts 16 times longer (some minutes)
  linbias inspect    see how far each head of a model reaches
  linbias doctor     see which backends can run on this machine, or why not
  linbias bench      time attention on this machine, beside torch's without a bias
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    0, 1 on an error, 2 on wrong usage, 130 and 143 after Ctrl-C and SIGTERM, 141 if whoever read the output left. Files
    are written before anything is printed, so that none is lost with the output.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is shown escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        command = _parse(given)
        _RUN[type(command)](command)
    except NobodyReads:
        return _SIGNALLED + _SIGPIPE
    except Interrupted as stop:
        _complain(f"linbias: {stop}; the same command goes on from here")
        return _SIGNALLED + stop.signum
    except KeyboardInterrupt:
        _complain("linbias: interrupted")
        return _SIGNALLED + signal.SIGINT
    except (*_ERRORS, RuntimeError) as error:
        # torch says that memory is out in a RuntimeError, which may also be a fault of the program.
        if not isinstance(error, _ERRORS) and "memory" not in str(error):
            raise
        _complain("\n".join([f"linbias: error: {str(error) or 'out of memory'}", *getattr(error, "__notes__", [])]))
        return 1
    return 0


class NobodyReads(Exception):
    """Whoever read the standard output is gone, as in `linbias compare | head -1`."""


@contextmanager
def _printing() -> Generator[None]:
    """What is printed inside is out when the block ends.

    Raises: NobodyReads; OSError, which says that the output could not be written, and no file.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer would fail once more when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), cast(TextIO, sys.stdout).fileno())
        if isinstance(error, BrokenPipeError):
            raise NobodyReads from None
        raise OSError(error.errno, f"cannot print: {error.strerror}", "standard output") from None


def _say(text: str) -> None:
    with _printing():
        print(text)


def _complain(text: str) -> None:
    # There may be nobody to complain to.
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _parse(arguments: list[str]) -> Any:
    # What tells people that tyro is missing must not need tyro.
    name, *rest = arguments or ["--help"]
    if name == "--version":
        _say(f"linbias {__version__}")
        raise SystemExit(0)
    if name in {"-h", "--help"}:
        _say(_overview())
        raise SystemExit(0 if arguments else 2)
    if name not in _COMMANDS:
        _complain(f"linbias: error: no command {name!r}; commands: {', '.join(_COMMANDS)}. See linbias --help")
        raise SystemExit(2)
    if name == "doctor" and set(rest) <= {"--json"}:
        return DoctorCommand(json="--json" in rest)
    tyro = need("tyro")
    with _printing():
        return tyro.cli(
            _COMMANDS[name],
            prog=f"linbias {name}",
            args=rest,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
        )


def _overview() -> str:
    """What `linbias --help` says: each command by the first line of its class."""
    about = {name: textwrap.dedent(kind.__doc__ or "").split("\n\n")[0].split() for name, kind in _COMMANDS.items()}
    width = max(map(len, about)) + 4
    rows = [
        textwrap.fill(" ".join(words), 80, initial_indent=f"  {name}".ljust(width), subsequent_indent=" " * width)
        for name, words in about.items()
    ]
    usage = "usage: linbias COMMAND [options], linbias --version; the options of one: linbias COMMAND --help"
    extra = "All but doctor need the extra lab: pip install 'linbias[lab]'"
    return "\n".join([usage, "", _DESCRIPTION, "Commands:", *rows, "", extra])


def _train(command: TrainCommand) -> None:
    _say(describe_training(train_one(command)))


def _evaluate(command: EvaluateCommand) -> None:
    if command.model is not None:
        _report(*evaluate_folder(command))
        return
    found = evaluate_checkpoint(command)
    files = [] if command.json is None else [command.json]
    for path in files:
        write_text(path, json.dumps(found, indent=1, allow_nan=False))
    _report(describe_evaluation(found), files)


def _compare(command: CompareCommand) -> None:
    # Missing packages are told before minutes of work, not after.
    for package in ("matplotlib", "jinja2", "safetensors", "tqdm"):
        need(package)
    results = compare(command)
    kept = set_aside(results, command.out)
    files = write_exports(results, command.out)
    moved = "" if kept is None else f"\n\nan earlier report held what this one lacks; it is now in {printable(kept)}"
    _report(results_text(results) + moved, files)
    if all(row.diverged for row in results.rows):
        raise Diverged("every training diverged; try a lower learning rate")


def _inspect(command: InspectCommand) -> None:
    if command.model is None:
        shown, length = inspect_heads(command), command.length or LENGTH
        text = heads_table(command, shown)
    else:
        measured = measure(command.model, command.data, command.length or 1024)
        layers = layers_of(command, measured)
        shown, length = [fact for _, fact in farthest(layers)], measured.length
        text = measured_table(command, measured, layers)
    files = [] if command.plot is None else [command.plot]
    for path in files:
        write_bytes(path, draw_heads(shown, length, path.suffix.lower().removeprefix(".")))
    _report(text, files)


def _doctor(command: DoctorCommand) -> None:
    found = doctor.examine()
    _say(json.dumps(found, indent=1) if command.json else doctor.describe(found))


def _bench(command: BenchCommand) -> None:
    for package in ("matplotlib", "tqdm"):
        need(package)
    record = bench(command)
    files = write_plot(record, command.out)
    _report(describe_bench(record), files)


def _answer(run: Callable[[Any], tuple[str, list[Path]]], command: Any) -> None:
    _report(*run(command))


def _report(text: str, written: Sequence[Path]) -> None:
    """Print a text and the files that were written before it."""
    files = [f"\n\nwritten: {', '.join(map(printable, written))}"] if written else []
    _say("".join([text, *files]))


_COMMANDS = {
    "compare": CompareCommand,
    "train": TrainCommand,
    "evaluate": EvaluateCommand,
    "inspect": InspectCommand,
    "doctor": DoctorCommand,
    "bench": BenchCommand,
    **{name: kind for name, (kind, _) in EVALUATIONS.items()},
}
_RUN: dict[type, Callable[[Any], None]] = {
    CompareCommand: _compare,
    TrainCommand: _train,
    EvaluateCommand: _evaluate,
    InspectCommand: _inspect,
    DoctorCommand: _doctor,
    BenchCommand: _bench,
    **{kind: partial(_answer, run) for kind, run in EVALUATIONS.values()},
}

if __name__ == "__main__":
    raise SystemExit(main())
