# SPDX-License-Identifier: Apache-2.0
"""The command line: one subcommand for each command class of the workbench."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

from .errors import BackendUnavailable
from .lab import doctor
from .lab.bench.run import Unfit, bench, write_plot
from .lab.bench.show import describe_bench
from .lab.compare import compare
from .lab.config import (
    BenchCommand,
    CompareCommand,
    ConfigError,
    DoctorCommand,
    EvaluateCommand,
    InspectCommand,
    TrainCommand,
)
from .lab.data import DataError
from .lab.evaluations.commands import EVALUATIONS
from .lab.exports import results_text, write_exports
from .lab.extras import MissingExtra, need
from .lab.heads import heads_table, inspect_heads
from .lab.plots import draw_heads
from .lab.progress import Interrupted
from .lab.single import describe_evaluation, describe_training, evaluate_checkpoint, train_one
from .lab.storage import CheckpointError, write_bytes, write_text
from .lab.tasks import WorkerDied

_INTERRUPTED = 130
_ERRORS = (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    DataError,
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
    """Run the command line and return its exit status: 0, 1 on an error, 130 if interrupted, 2 on wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = _parse(given)
        _RUN[type(command)](command)
    except Interrupted as stop:
        print(f"linbias: {stop}; the same command goes on from here", file=sys.stderr)
        return _INTERRUPTED
    except KeyboardInterrupt:
        print("linbias: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except _ERRORS as error:
        print("\n".join([f"linbias: error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 1
    return 0


def _parse(arguments: list[str]) -> Any:
    # What tells people that tyro is missing must not need tyro.
    if arguments[:1] == ["doctor"] and set(arguments[1:]) <= {"--json"}:
        return DoctorCommand(json="--json" in arguments)
    tyro = need("tyro")
    commands = tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in _COMMANDS.items())
    return tyro.cli(
        Union[commands],  # noqa: UP007
        prog="linbias",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _train(command: TrainCommand) -> None:
    print(describe_training(train_one(command)))


def _evaluate(command: EvaluateCommand) -> None:
    found = evaluate_checkpoint(command)
    print(describe_evaluation(found))
    if command.json is not None:
        write_text(command.json, json.dumps(found, indent=1))
        print(f"\nwritten: {command.json}")


def _compare(command: CompareCommand) -> None:
    # Missing packages are told before minutes of work, not after.
    for package in ("matplotlib", "jinja2", "safetensors", "tqdm"):
        need(package)
    results = compare(command)
    print(results_text(results))
    _written(write_exports(results, command.out))


def _inspect(command: InspectCommand) -> None:
    facts = inspect_heads(command)
    print(heads_table(command, facts))
    write_bytes(command.plot, draw_heads(command, facts))
    _written([command.plot])


def _doctor(command: DoctorCommand) -> None:
    found = doctor.examine()
    print(json.dumps(found, indent=1) if command.json else doctor.describe(found))


def _bench(command: BenchCommand) -> None:
    for package in ("matplotlib", "tqdm"):
        need(package)
    record = bench(command)
    print(describe_bench(record))
    _written(write_plot(record, command.out))


def _written(files: list[Path]) -> None:
    print("\nwritten: " + ", ".join(map(str, files)))


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
    **dict(EVALUATIONS.values()),
}

if __name__ == "__main__":
    raise SystemExit(main())
