# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import pytest

from linbias.cli import main

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
        assert f"• {command} " in text
    assert "linbias compare train five small models on Jane Austen" in text


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
    assert "nothing here tells whether the model was trained on some of it" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "--data", "no/such/file"], "data must be an existing text file or folder, got 'no/such/file'"),
        (["compare", "--lengths", "0"], "lengths must be one or more whole numbers of at least 1"),
        (["compare", "--width", "100"], "width must be a multiple of twice the heads, got width 100 with 8 heads"),
        (["compare", "--workers", "0"], "workers must be at least 1, got 0"),
        (["compare", "--schemes", "rope", "rope"], "schemes must not repeat, got rope rope"),
        (["train", "--steps", "0"], "steps must be at least 1, got 0"),
        (["train", "--learning-rate", "0"], "learning_rate must be greater than 0 and finite, got 0.0"),
        (["train", "--learning-rate", "inf"], "learning_rate must be greater than 0 and finite, got inf"),
        (["train", "--learning-rate", "nan"], "learning_rate must be greater than 0 and finite, got nan"),
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


def test_inspect_draws_and_tabulates(tmp_path, capsys):
    plot = tmp_path / "heads.png"
    assert main(["inspect", "--heads", "4", "--length", "100", "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "0.00390625" in capsys.readouterr().out


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
    refused = run("compare")
    assert refused.returncode == 1
    assert "needs the package 'tyro', which is not installed; run: pip install 'linbias[lab]'" in refused.stderr


def test_compare_misses_a_plotting_package_before_it_trains(tmp_path):
    command = [sys.executable, "-c", without("matplotlib"), "compare"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "needs the package 'matplotlib'" in refused.stderr
    assert not list(tmp_path.iterdir())
