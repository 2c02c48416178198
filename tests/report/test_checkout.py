"""What has to agree between the files of this repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from qsa_kernels.report import book, doctor, profiles, repository, tables
from qsa_kernels.report.templates import Template

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = sorted((ROOT / "notebooks/profiles").glob("*.yaml"))
LOCK = {
    canonicalize_name(requirement.name): requirement
    for requirement in map(Requirement, (ROOT / "requirements.lock").read_text().splitlines())
}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.delenv("QSA_ROOT", raising=False)


def test_the_lock_pins_exact_versions_and_names_no_address():
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    assert not re.search(r"^-", text, flags=re.M)
    assert all(re.fullmatch(r"==[^*,]+", str(requirement.specifier)) for requirement in LOCK.values())


def test_the_lock_satisfies_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    for requirement in map(Requirement, wanted):
        pinned = str(LOCK[canonicalize_name(requirement.name)].specifier).removeprefix("==")
        assert requirement.specifier.contains(pinned, prereleases=True), requirement


def test_the_conda_environment_agrees():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    names = {}
    for line in environment["dependencies"]:
        name, _, version = line.partition("=")
        names[name] = version.strip("=")
    assert SpecifierSet(project["requires-python"]).contains(f"{names['python']}.0")
    # Two places for one version would drift apart.
    assert not set(names) & set(LOCK)
    assert environment["name"] == project["name"]


def test_the_citation_agrees_with_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["title"].startswith(f"{project['name']}: ")
    assert citation["authors"] == [{"name": f"The {project['name']} maintainers"}]


def test_publishing_builds_with_the_commands_of_the_makefile_and_pinned_actions():
    jobs = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    called = {step["run"].split()[1] for step in steps if step.get("run", "").startswith("make ")}
    assert "report" in called
    assert called <= targets


def test_every_template_is_listed_and_every_listed_chapter_has_one():
    assert sorted(book.chapters()) == [path.stem for path in TEMPLATES]


@pytest.mark.parametrize("page", [page for page in book.pages() if not page.startswith(book.RESULTS)])
def test_every_written_page_is_there(page):
    assert (ROOT / f"{page}.md").is_file()


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_carry_no_results_and_say_their_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info.name == "python"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert notebook.cells[0].source.startswith("# ")
    assert "page.provenance()" in notebook.cells[-1].source


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_accept_their_own_defaults(path):
    template = Template(path)
    assert template.resolve({}) == template.defaults


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_profiles_plan_every_chapter_with_values_that_it_accepts(profile):
    plan = profiles.load(str(profile))
    for path in TEMPLATES:
        assert path.stem in plan.chapters
        Template(path).resolve(plan.chapters[path.stem].values())
    assert not set(plan.chapters) - {path.stem for path in TEMPLATES}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_figures_carry_caption_name_and_alt_text(path):
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells, start=1):
        if "page.figure(" in cell.source:
            settings = cell.metadata.get("mystnb", {})
            assert settings.get("figure", {}).get("caption"), f"cell {number}"
            assert settings.get("figure", {}).get("name"), f"cell {number}"
            assert settings.get("image", {}).get("alt"), f"cell {number}"


def test_make_says_what_there_is():
    answer = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert {"report", "test", "lint", "serve", "clean"} <= set(re.findall(r"make (\w+)", answer.stdout))


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_make_refuses_another_python_in_one_line(tmp_path, version):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version}.1\nexit 1\n')
    python.chmod(0o755)
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    answer = subprocess.run(
        ["make", "install", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert answer.returncode != 0
    assert f"Python {version}.1" in answer.stderr
    assert "3.11 or 3.12" in answer.stderr
    assert not (tmp_path / ".venv").exists()


def test_ci_runs_what_the_readme_names():
    script = (ROOT / ".ci/run").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in ("make test", "make report"):
        assert command in script
        assert command in readme
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci/run")]).returncode == 0


def test_the_doctor_examines_this_machine():
    found = tables.validate(doctor.examine(), "environment_checks").set_index("check")
    assert found.loc["Python", "status"] == "passed"
    assert found.loc["Jupyter Book", "value"].startswith("1.")
    assert (found.loc[found["status"] == "skipped", "reason"] != "").all()


def test_the_doctor_names_a_package_of_another_version(monkeypatch):
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.0.1" if name == "numpy" else real(name))
    found = doctor.examine().set_index("check")
    assert found.loc["locked packages", "status"] == "failed"
    assert "numpy 0.0.1 (expected ==" in found.loc["locked packages", "reason"]


def test_the_package_hash_follows_every_source_file(tmp_path, monkeypatch):
    folder = tmp_path / "qsa_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(repository.qsa_kernels, "__file__", str(folder / "__init__.py"))
    first = repository.package_sha256()
    (folder / "more.py").write_text("x = 1\n")
    second = repository.package_sha256()
    (folder / "more.py").rename(folder / "most.py")
    assert len({first, second, repository.package_sha256()}) == 3


def test_a_folder_without_git_says_so(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.setenv("QSA_ROOT", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert repository.commit() == repository.is_dirty() == "not available"
    (tmp_path / "notebooks").rmdir()
    with pytest.raises(FileNotFoundError, match="QSA_ROOT"):
        repository.root()


@pytest.mark.parametrize("command", ["run", "report", "book", "batch", "doctor", "record", "capacity", "codegen"])
def test_commands_explain_themselves_at_once(command, in_subprocess):
    status, output = in_subprocess(command, "--help")
    assert status == 0
    assert "Usage" in output


def test_asking_for_help_loads_neither_torch_nor_pandas():
    code = "import sys, qsa_kernels.report.cli; sys.exit(bool({'torch', 'pandas', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
