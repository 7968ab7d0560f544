# SPDX-License-Identifier: Apache-2.0
import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import linbias
from linbias.cli import _parse, main
from linbias.lab.config import CompareCommand, EvaluateConfig, ModelConfig, TrainConfig, command_line

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--steps", "5", "--passages", "2"]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("".join(f"In year {year} the fox met {year * 37 % 101} hens. " for year in range(100)))
    return path


@pytest.fixture
def checkpoint(text_file, tmp_path):
    assert main(["train", "--data", str(text_file), "--out", str(tmp_path / "runs"), *SMALL]) == 0
    (path,) = (tmp_path / "runs").iterdir()
    return path


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_help_says_where_to_start(capsys):
    text = help_of(capsys)
    for command in ("compare", "train", "evaluate", "inspect", "doctor", "bench"):
        assert f" {command} " in text
    assert "linbias compare train five small models on Jane Austen" in text


def test_errors_point_to_the_help_of_their_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--lenght", "4"])
    assert stop.value.code == 2 and "linbias train --help" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2 and "no command 'trian'; commands: compare, train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "compare",
            ["--schemes", "--data", "--out", "--workers", "--width", "--length", "--seed", "--lengths", "--stride"],
        ),
        ("train", ["--scheme", "--data", "--out", "--device", "--layers", "--heads", "--steps", "--learning-rate"]),
        ("evaluate", ["--checkpoint", "--scheme", "--split", "--json", "--test-bytes", "--stride"]),
        ("inspect", ["--heads", "--rule", "--max-bias", "--dtype", "--content", "--tolerance", "--plot"]),
        ("doctor", ["--json"]),
        ("bench", ["--quick", "--lengths", "--parts", "--backends", "--threads", "--out"]),
    ],
)
def test_every_flag_is_explained(capsys, command, flags):
    text = help_of(capsys, command)
    for flag in flags:
        assert flag in text


def test_wrong_usage_exits_with_2_and_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "compare, train, evaluate, inspect, doctor, bench" in " ".join(capsys.readouterr().err.split())


def test_a_trained_checkpoint_can_be_evaluated(checkpoint, text_file, tmp_path, capsys):
    report = tmp_path / "found.json"
    status = main(
        [
            "evaluate",
            "--checkpoint",
            str(checkpoint),
            "--lengths",
            "8",
            "24",
            "--test-bytes",
            "72",
            "--json",
            str(report),
        ]
    )
    assert status == 0
    found = json.loads(report.read_text())
    assert (found["scored"], [cell["length"] for cell in found["cells"]]) == (72, [8, 24])
    assert f"{found['cells'][1]['bits']['mean']:.4f}" in capsys.readouterr().out


def evaluate(checkpoint, *more):
    return main(["evaluate", "--checkpoint", str(checkpoint), "--lengths", "8", "--test-bytes", "72", *more])


@pytest.mark.parametrize("change", ["cut", "replaced", "grown"])
def test_data_that_changed_after_training_is_not_scored(checkpoint, text_file, change, capsys):
    content = text_file.read_text()
    text_file.write_text({"cut": content[:2000], "replaced": content.swapcase(), "grown": content + "more "}[change])
    assert evaluate(checkpoint) == 1
    told = capsys.readouterr().err
    assert "changed since (by SHA-256), so that it may be tested on bytes it was trained on" in told
    assert "--data" in told
    assert evaluate(checkpoint, "--data", str(text_file)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "nothing here tells whether the model was trained on some of it" in shown


def test_a_path_that_a_checkpoint_names_is_told_before_it_is_read(checkpoint, text_file, capsys):
    assert evaluate(checkpoint) == 0
    shown = capsys.readouterr()
    assert f"reading {str(text_file)!r}, the data that the checkpoint names" in shown.err
    assert "nothing here tells" not in shown.out
    assert evaluate(checkpoint, "--data", str(text_file), "--split", "train") == 0
    shown = capsys.readouterr()
    assert "reading" not in shown.err
    assert "text: the model was trained on this text" in shown.out


def test_sliding_evaluation_has_more_context(checkpoint, tmp_path):
    contexts = []
    for stride in ([], ["--stride", "1"]):
        report = tmp_path / "found.json"
        arguments = ["evaluate", "--checkpoint", str(checkpoint), "--lengths", "8", "--test-bytes", "64"]
        assert main([*arguments, "--json", str(report), *stride]) == 0
        contexts.append(json.loads(report.read_text())["cells"][0]["mean_context"])
    assert contexts == [3.5, (sum(range(8)) + 56 * 7) / 64]


def test_compare_writes_its_report(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["compare", "--data", str(text_file), "--schemes", "alibi", "learned", "--out", str(out), *SMALL]
    assert main([*arguments, "--lengths", "8", "16", "--test-bytes", "64", "--workers", "1"]) == 0
    assert {"report.html", "plot.png", "results.csv", "results.json"} <= {path.name for path in out.iterdir()}
    shown = capsys.readouterr().out
    assert "cannot run" in shown
    assert "report.html" in shown


def test_the_command_of_a_report_runs_the_same_again(tmp_path):
    commands = [
        CompareCommand(),
        CompareCommand(
            data=tmp_path / "it's text",
            schemes=("rope", "none"),
            workers=3,
            model=ModelConfig(layers=1),
            train=TrainConfig(learning_rate=1e-5, seed=7),
            evaluate=EvaluateConfig(lengths=(8, 16), stride=4),
        ),
    ]
    for command in commands:
        program, *words = shlex.split(command_line("compare", command))
        assert (program, _parse(words)) == ("linbias", command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--data", "no/such/file"], "data must be an existing text file or folder, got 'no/such/file'"),
        (["compare", "--lengths", "0"], "lengths must be one or more whole numbers of at least 1"),
        (["compare", "--width", "100"], "width must be a multiple of twice the heads, got width 100 with 8 heads"),
        (["compare", "--workers", "0"], "workers must be at least 1, got 0"),
        (["compare", "--workers", str(10**30)], "workers must be at most 1024, got 1000000000"),
        (["compare", "--schemes", "rope", "rope"], "schemes must not repeat, got rope rope"),
        (["train", "--steps", "0"], "steps must be at least 1, got 0"),
        (["train", "--learning-rate", "0"], "learning_rate must be greater than 0 and finite, got 0.0"),
        (["train", "--learning-rate", "inf"], "learning_rate must be greater than 0 and finite, got inf"),
        (["train", "--learning-rate", "nan"], "learning_rate must be greater than 0 and finite, got nan"),
        (["compare", "--clip", "inf"], "clip must be greater than 0 and finite, got inf; 1e30 clips no gradient"),
        (["train", "--weight-decay", "inf"], "weight_decay must be finite, got inf"),
        (["train", "--seed", str(2**63)], f"seed must be at most {2**63 - 1}, got {2**63}"),
        (["compare", "--seed", str(10**30)], "seed must be at most"),
        (["train", "--width", "1000000", "--heads", "2"], "width must be at most 5,461 with 3 layers"),
        (["compare", "--layers", "1000000"], "layers must be at most 1024, got 1000000"),
        (["train", "--passages", str(10**18)], "passages times length must be at most 67,108,864 bytes in one update"),
        (["evaluate", "--checkpoint", "nothing"], "checkpoint must be an existing file, got 'nothing'"),
        (["train", "--device", "abacus"], "device must be auto or one that torch can use here, got 'abacus'"),
        (["compare", "--device", "meta"], "device must be auto or one that torch can use here, got 'meta'"),
        (["inspect", "--heads", "0"], "heads must be at least 1, got 0"),
        (["inspect", "--heads", "100000"], "heads must be at most 4096, got 100000"),
        (["inspect", "--plot", "x.jpg"], "plot must end in .png, .svg or .pdf, got 'x.jpg'"),
        (["inspect", "--plot", "x"], "plot must end in .png, .svg or .pdf, got 'x'"),
        (["inspect", "--model", "no/such"], "checkpoint must be an existing file, got 'no/such'"),
        (["inspect", "--model", "."], "which holds none; name one"),
        (["inspect", "--model", "x", "--heads", "8"], "heads must be left out where a model is given"),
        (["inspect", "--data", "x"], "data must be left out where no model is given"),
        (["inspect", "--tolerance", "1.5"], "tolerance must lie between 0 and 1, got 1.5"),
        (["inspect", "--content", "nan"], "content must be finite, got nan"),
        (["inspect", "--content", "inf"], "content must be finite, got inf"),
        (["inspect", "--max-bias", "inf"], "max_bias must be greater than 0 and finite, got inf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_what_was_wrong(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status in {1, 2}
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in shown
    assert not list(tmp_path.iterdir())


@pytest.fixture
def standard_output(monkeypatch):
    """Make the standard output a pipe nobody reads, a full disk, or a terminal of another encoding."""
    opened = []

    def become(kind):
        if kind == "left":
            read, write = os.pipe()
            os.close(read)
        else:
            write = os.open("/dev/full" if kind == "full" else os.devnull, os.O_WRONLY)
        opened.append(open(write, "w", encoding=kind if kind in {"cp1252", "ascii"} else "utf-8"))
        monkeypatch.setattr("sys.stdout", opened[-1])

    yield become
    for file in opened:
        file.close()


@pytest.mark.parametrize(("kind", "status"), [("left", 141), ("full", 1), ("cp1252", 0), ("ascii", 0)])
def test_files_are_written_whatever_becomes_of_the_output(text_file, tmp_path, capsys, standard_output, kind, status):
    if kind == "full" and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    out = tmp_path / "小説 ± 报告"
    arguments = ["--data", str(text_file), "--out", str(out), *SMALL, "--test-bytes", "64", "--lengths", "8"]
    standard_output(kind)
    assert main(["compare", *arguments, "--schemes", "none", "--workers", "1"]) == status
    assert {"report.html", "plot.png", "results.csv", "results.json"} <= {path.name for path in out.iterdir()}
    (checkpoint,) = out.glob("checkpoints/*.safetensors")
    standard_output(kind)
    assert evaluate(checkpoint, "--json", str(out / "found.json")) == status
    assert json.loads((out / "found.json").read_text())["scored"] == 72
    standard_output(kind)
    assert main(["inspect", "--heads", "3", "--plot", str(out / "heads.png")]) == status
    assert (out / "heads.png").exists()
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert told.count("cannot print: No space left on device: 'standard output'") == (3 if kind == "full" else 0)


def test_names_of_files_need_not_be_text(text_file, tmp_path, capsys):
    data, out = (Path(os.fsdecode(os.fsencode(tmp_path) + name)) for name in (b"/in\xff.txt", b"/out\xff"))
    data.write_bytes(text_file.read_bytes())
    arguments = ["--data", str(data), "--out", str(out), *SMALL, "--test-bytes", "64", "--lengths", "8"]
    assert main(["compare", *arguments, "--schemes", "alibi", "--workers", "1"]) == 0
    assert r"tested on 64 bytes of in\xff.txt, last 10 %" in " ".join(capsys.readouterr().out.split())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert r"in\xff.txt" in page
    json.loads((out / "results.json").read_text(encoding="utf-8")).keys()
    (checkpoint,) = out.glob("checkpoints/*.safetensors")
    assert evaluate(checkpoint, "--json", str(out / "found.json")) == 0
    assert r"in\xff.txt" in json.loads((out / "found.json").read_text())["text"]


def test_a_model_beyond_the_free_memory_is_refused(text_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linbias.lab.train._free_memory", lambda: 100_000)
    assert main(["train", "--data", str(text_file), "--out", str(tmp_path / "runs"), *SMALL]) == 1
    assert "width and layers must leave room in memory: training needs 0.0 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried 9 bytes")],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_out_is_told_in_a_line(text_file, tmp_path, capsys, monkeypatch, error):
    def fail(self):
        raise error

    monkeypatch.setattr("linbias.lab.train.Trainer.update", fail)
    assert main(["train", "--data", str(text_file), "--out", str(tmp_path / "runs"), *SMALL]) == 1
    assert "memory" in capsys.readouterr().err
    monkeypatch.setattr("linbias.lab.train.Trainer.update", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", "--data", str(text_file), "--out", str(tmp_path / "runs"), *SMALL])


def test_help_that_nobody_reads_is_no_error(standard_output, capsys):
    standard_output("left")
    assert main(["--help"]) == 141
    assert capsys.readouterr().err == ""


def test_work_goes_on_when_nobody_reads_its_progress(text_file, tmp_path, monkeypatch):
    class Gone(io.StringIO):
        tried = 0

        def write(self, text):
            self.tried += 1
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("linbias.lab.progress._LINE_SECONDS", 0.0)
    for place, stderr in (("runs", Gone()), ("more", None)):
        with monkeypatch.context() as context:
            context.setattr("sys.stderr", stderr)
            assert main(["train", "--data", str(text_file), "--out", str(tmp_path / place), *SMALL]) == 0
        assert stderr is None or stderr.tried == 1


def test_a_full_disk_and_a_folder_without_rights_are_told_by_the_file(tmp_path, capsys, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    plot = tmp_path / "heads.png"
    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    assert main(["inspect", "--plot", str(plot)]) == 1
    assert f"cannot write: No space left on device: '{plot}'" in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "file").write_text("no folder")
    assert main(["inspect", "--plot", str(tmp_path / "file" / "heads.png")]) == 1
    assert f"cannot make the folder: File exists: '{tmp_path / 'file'}'" in capsys.readouterr().err
    monkeypatch.setattr("os.replace", lambda *names: os.rename(tmp_path / "absent", names[0]))
    assert main(["inspect", "--plot", str(plot)]) == 1
    assert f"cannot write: No such file or directory: '{plot}'" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["1e9", "1e38", "1e300"])
def test_a_training_that_diverges_is_an_error(text_file, tmp_path, capsys, rate):
    arguments = ["train", "--data", str(text_file), "--out", str(tmp_path / "runs"), *SMALL, "--learning-rate", rate]
    told = []
    for _ in range(2):
        assert main(arguments) == 1
        told.append(capsys.readouterr().err.splitlines()[-2:])
    assert told[0] == told[1]
    assert re.search(r"training diverged at update \d of 5: the (validation )?loss is ", told[0][0])
    assert f"try a learning rate below {float(rate):g}" in told[0][0]
    (file,) = (tmp_path / "runs").iterdir()
    assert file.name.endswith(".diverged.json")


def test_a_comparison_without_a_figure_is_written_and_an_error(text_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["compare", "--data", str(text_file), "--schemes", "alibi", "learned", "--out", str(out), *SMALL]
    arguments += ["--lengths", "8", "16", "--test-bytes", "64", "--workers", "1", "--learning-rate", "1e20"]
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.out.count("ALiBi: training diverged at update") == 1
    assert "every training diverged" in shown.err
    assert "diverged" in (out / "report.html").read_text()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_decides_the_exit_status(text_file, tmp_path, capsys, monkeypatch, signum, status):
    monkeypatch.setattr("linbias.lab.train.Trainer.update", lambda self: os.kill(os.getpid(), signum) or 1.0)
    assert main(["train", "--data", str(text_file), "--out", str(tmp_path / "runs"), *SMALL]) == status
    assert "the same command goes on from here" in capsys.readouterr().err


def test_inspect_tabulates_and_draws_where_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "--heads", "4", "--length", "100"]) == 0
    assert "0.00390625" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    for name, start in (("heads.PNG", b"\x89PNG"), ("heads.pdf", b"%PDF"), ("heads.svg", b"<?xml")):
        assert main(["inspect", "--heads", "4", "--length", "100", "--plot", name]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
        assert f"written: {name}" in capsys.readouterr().out


def test_inspect_measures_a_checkpoint_or_the_folder_it_lies_in(checkpoint, text_file, tmp_path, capsys):
    shown = []
    for model in (checkpoint, checkpoint.parent):
        arguments = ["inspect", "--model", str(model), "--data", str(text_file), "--length", "50"]
        assert main([*arguments, "--plot", str(tmp_path / "heads.png")]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    text = " ".join(shown[0].split())
    assert "1 layers of 2 heads, measured on 50 tokens of story.txt, last 10 %" in text
    assert (tmp_path / "heads.png").exists()


def test_doctor_knows_every_backend(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "runs this call" in found["backends"]["cpu"].values()
    assert {"native", "tiled", "reference"} <= set(found["backends"]["cpu"])
    assert main(["doctor"]) == 0
    assert "runs this call" in capsys.readouterr().out


def without(*packages):
    """Python code that runs the command line where `packages` are not installed."""
    blocked = ", ".join(f"{package}=None" for package in packages)
    return f"import sys; sys.modules.update({blocked}); from linbias.cli import main; sys.exit(main(sys.argv[1:]))"


def test_without_the_extra_doctor_works_and_the_rest_say_what_to_install(tmp_path):
    bare = without("tyro", "tqdm", "matplotlib", "jinja2", "safetensors")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", bare, *arguments], capture_output=True, text=True, cwd=tmp_path, check=False
        )

    assert run("doctor").returncode == 0
    shown = run("--help")
    assert shown.returncode == 0 and "compare" in shown.stdout and "linbias[lab]" in shown.stdout
    assert run("--version").stdout == f"linbias {linbias.__version__}\n"
    assert run().returncode == 2
    refused = run("compare")
    assert refused.returncode == 1
    assert "needs the package 'tyro', which is not installed; run: pip install 'linbias[lab]'" in refused.stderr


def test_compare_misses_a_plotting_package_before_it_trains(tmp_path):
    command = [sys.executable, "-c", without("matplotlib"), "compare"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "needs the package 'matplotlib'" in refused.stderr
    assert not list(tmp_path.iterdir())
