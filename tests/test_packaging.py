# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what it imports, which file may know which, and that what its texts show runs."""

import doctest
import graphlib
import importlib
import importlib.metadata
import os
import pydoc
import re
import subprocess
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest
import torch

import linbias
from tests.imports import EXTENSION, MODULES, ROOT, imports_of, room_of

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]

# Each module or subpackage may import from its own line and from the lines above it.
LAYERS = (
    {"errors"},
    {"semantics", "_native"},
    {"prepare", "backends", "ops"},
    {"attention", "varlen", "cache"},
    {"flash", "interop", "nn", "hf", "testing", "vllm"},
    {"__init__"},
    {"lab"},
    {"cli"},
)
RANKS = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


OPTIONAL = {re.split(r"[\[<>=]", item)[0].replace("-", "_") for extra in EXTRAS.values() for item in extra}
# A module of these may need an extra to be imported; every other one must do without.
NEEDS_EXTRA = ("linbias.lab", "linbias.hf.", "linbias.cli", "linbias.backends.triton.kernels.", "linbias.vllm.")
BASE_MODULES = [name for name in MODULES if not name.startswith(NEEDS_EXTRA)]


def run_python(code: str) -> None:
    """`code` in a fresh interpreter where warnings are errors."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rank_of(name: str) -> int:
    room = room_of(name)
    assert room in RANKS, f"{name} has no place in LAYERS: say in this file what it may import"
    return RANKS[room]


def test_the_base_import_needs_only_torch_and_numpy():
    blocked = sorted({*OPTIONAL, EXTENSION})
    run_python(
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        f"import importlib; [importlib.import_module(name) for name in {BASE_MODULES}]\n"
        "import torch, linbias\n"
        "query = torch.ones(1, 2, 5, 4)\n"
        "out = linbias.alibi_attention(query, query, query, linbias.alibi_slopes(2), causal=True)\n"
        "assert torch.allclose(out, query), out"
    )


def test_importing_linbias_leaves_torch_as_it_was():
    run_python(
        "import torch\n"
        "before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()\n"
        "torch.manual_seed(7); drawn = torch.rand(3); torch.manual_seed(7)\n"
        "import linbias\n"
        "assert torch.equal(torch.rand(3), drawn)\n"
        "assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())"
    )


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_layers(name: str):
    for target in imports_of(name):
        assert rank_of(target) <= rank_of(name), f"{name} imports {target}, which stands above it"


def test_imports_have_no_cycle():
    graph = {name: imports_of(name) & MODULES.keys() for name in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("backend", linbias.backends.available())
def test_backends_never_import_each_other(backend: str):
    own = [name for name in MODULES if re.match(rf"linbias\.backends\.{backend}(\.|$)", name)]
    assert f"linbias.backends.{backend}" in own
    for name in own:
        foreign = {target for target in imports_of(name) - set(own) if target.startswith("linbias.backends")}
        assert not foreign, f"{name} imports {foreign}"


def test_the_reference_knows_the_rule_and_nothing_of_tiles_or_bounds():
    """It shares with `tiled` what a call means, at blocks of one; numpy loops in the tests check that rule."""
    allowed = {"linbias.semantics.blocks", "linbias.semantics.dropout", "linbias.semantics.problem"}
    source = MODULES["linbias.backends.reference"].read_text()
    assert imports_of("linbias.backends.reference") <= allowed
    assert re.findall(r"^from \.\.semantics\.blocks import (.*)$", source, re.MULTILINE) == ["dense"]


def test_the_import_test_sees_relative_and_absolute_imports():
    assert {"linbias.ops", "linbias.backends.reference"} <= imports_of("linbias.attention")
    assert "linbias.attention" in imports_of("linbias")


def test_kernels_include_no_framework_header():
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".hpp", ".cpp"}]
    foreign = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10|Python\.h|pybind11|nanobind|cblas|mkl)")
    for path in sources:
        if path.name != "bindings.cpp":
            assert not foreign.search(path.read_text()), path


SOURCES = sorted(
    [*MODULES.values(), *ROOT.glob("csrc/**/*.[ch]*"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_name_their_licence(path: Path):
    assert "SPDX-License-Identifier: Apache-2.0" in "".join(path.read_text().splitlines()[:2])


def test_the_version_is_the_installed_one():
    try:
        installed = importlib.metadata.version("linbias")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("linbias is imported from its sources without being installed")
    assert linbias.__version__ == installed


def test_build_requirements_do_not_pull_torch():
    names = [re.split(r"[<>=]", requirement)[0] for requirement in PYPROJECT["build-system"]["requires"]]
    assert names == ["scikit-build-core", "nanobind"]


def test_backends_that_must_run_here_do():
    required = os.environ.get("LINBIAS_REQUIRED_BACKENDS", "").split()
    if not required:
        pytest.skip("LINBIAS_REQUIRED_BACKENDS names no backend that must run on this machine")
    query = torch.ones(1, 1, 3, 16)
    for backend in required:
        linbias.alibi_attention(query, query, query, linbias.alibi_slopes(1), causal=True, backend=backend)


@pytest.mark.parametrize("name", BASE_MODULES)
def test_doctests(name: str):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed; see the output above"


def test_public_functions_show_an_example():
    for name, member in vars(linbias).items():
        if not isinstance(member, types.FunctionType) or member.__module__.startswith(NEEDS_EXTRA):
            continue
        assert doctest.DocTestFinder().find(member, name)[0].examples, f"linbias.{name} has no example"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_of_the_texts_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The python blocks of a page are run in order, as one program; the pycon blocks must print what they show."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for kind, source in FENCE.findall(page.read_text()):
        if kind == "python":
            try:
                exec(compile(source, page.name, "exec"), scope)
            except ModuleNotFoundError as missing:
                if (missing.name or "").partition(".")[0] not in OPTIONAL:
                    raise
                pytest.skip(f"{page.name} needs {missing.name}, which is not installed")
        else:
            examples = doctest.DocTestParser().get_doctest(source, scope, page.name, page.name, 0)
            report: list[str] = []
            failed = doctest.DocTestRunner().run(examples, out=report.append, clear_globs=False).failed
            scope.update(examples.globs)
            assert not failed, "".join(report)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_in_the_texts_exist(page: Path):
    for name in sorted(set(re.findall(r"`(linbias(?:\.\w+)+)", page.read_text()))):
        assert pydoc.locate(name) is not None, f"{page.name} mentions {name}, which does not exist"


def test_the_proof_names_tests_that_exist():
    sources = "".join(path.read_text() for path in (ROOT / "tests").glob("**/*.py"))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "proof.md").read_text()))
    assert len(named) > 20
    missing = {name for name in named if f"def {name}(" not in sources}
    assert not missing, f"docs/proof.md names {sorted(missing)}"


def test_files_that_the_proof_names_exist():
    for path in re.findall(r"`((?:tests|csrc)/[\w/.]+)`", (ROOT / "docs" / "proof.md").read_text()):
        assert (ROOT / path).exists(), f"docs/proof.md names {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_the_texts_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_the_file_map_of_the_readme_is_the_tree():
    listed = set(re.findall(r"^(src/linbias/[\w/.]+)\s", (ROOT / "README.md").read_text(), re.MULTILINE))
    there = {path.relative_to(ROOT).as_posix() for path in MODULES.values() if path.read_text().strip()}
    assert listed == there, f"not in README: {sorted(there - listed)}; only in README: {sorted(listed - there)}"


def test_the_warnings_of_the_examples_are_errors():
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", UserWarning, stacklevel=1)
