"""Parameters are refused before anything runs, with the name and what is allowed."""

from __future__ import annotations

import pytest

from qsa_kernels.report.templates import Template


def test_defaults_and_types_come_from_the_parameters_cell(checkout):
    template = Template(
        checkout.notebook("other", parameters="rows: int = 3  # b = c\ntext = 'a=b'\nscales: list[float] = [0.5]")
    )
    assert template.defaults == {"rows": 3, "text": "a=b", "scales": [0.5]}
    assert template.resolve({"text": "c=d", "scales": [1.5, 2]}) == {"rows": 3, "text": "c=d", "scales": [1.5, 2.0]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"TOPKK": 64}, ["unknown parameter 'TOPKK'", "rows: int", "label: str"]),
        ({"rows": "sixty"}, ["'rows'", "integer", "'sixty'"]),
        ({"rows": True}, ["'rows'", "integer", "True"]),
        ({"rows": 0}, ["'rows'", "greater than or equal to 1", "0"]),
        ({"rows": float("nan")}, ["'rows'", "nan"]),
        ({"label": 5}, ["'label'", "string", "5"]),
    ],
    ids=["unknown", "text-for-number", "bool-for-number", "below-minimum", "nan", "number-for-text"],
)
def test_bad_values_are_named(checkout, values, words):
    template = Template(checkout.example())
    with pytest.raises(ValueError, match=r"notebook example\.ipynb") as caught:
        template.resolve(values)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_in_any_notebook(checkout, value):
    template = Template(checkout.notebook("other", parameters="scale: float = 0.5\nscales: list[float] = [0.5]"))
    with pytest.raises(ValueError, match="'scale'"):
        template.resolve({"scale": value})
    with pytest.raises(ValueError, match=r"'scales\.0'"):
        template.resolve({"scales": [value]})


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("scale=1e-3", 1e-3),
        ("scale=2", 2.0),
        ("text=0123456", "0123456"),
        ("text=yes", "yes"),
        ("text=a=b", "a=b"),
        ('text="quoted"', "quoted"),
        ("rows=[1, 2]", [1, 2]),
    ],
)
def test_assignments_are_read_for_the_parameters_type(checkout, assignment, expected):
    template = Template(
        checkout.notebook("other", parameters="scale: float = 0.5\ntext: str = ''\nrows: list[int] = [3]")
    )
    (value,) = template.parse([assignment]).values()
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("assignment", ["rows=sixty", "rows=.nan", "rows=2.5", "rows", "topkk=64", "rows=1: 2: 3"])
def test_assignments_that_cannot_be_are_refused(checkout, assignment):
    template = Template(checkout.example())
    with pytest.raises(ValueError, match=assignment.split("=")[0]):
        template.parse([assignment])


def test_a_key_given_twice_is_refused(checkout):
    with pytest.raises(ValueError, match="'rows' is given twice"):
        Template(checkout.example()).parse(["rows=1", "rows=2"])


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (None, "found none"),
        ("rows = int('3')", "rows: expected a plain value"),
        ("import os", "expected only lines"),
        ("rows: path = 3", "expected a type of"),
    ],
    ids=["no-cell", "expression", "statement", "unknown-type"],
)
def test_a_notebook_without_usable_parameters_is_refused(checkout, parameters, words):
    path = checkout.notebook("other", parameters=parameters)
    with pytest.raises(ValueError, match=words):
        Template(path)


def test_two_parameters_cells_are_refused(checkout):
    import nbformat

    path = checkout.example()
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("rows: int = 4", metadata={"tags": ["parameters"]}))
    nbformat.write(notebook, path)
    with pytest.raises(ValueError, match="found 2"):
        Template(path)


def test_a_cell_that_disagrees_with_the_chapters_model_is_refused(checkout):
    path = checkout.notebook("example", parameters="rows: int = 3")
    with pytest.raises(ValueError, match=r"declares rows, but ExampleParameters has label, rows"):
        Template(path)


def test_files_that_are_no_notebooks_are_refused(checkout):
    path = checkout.root / "notebooks/broken.ipynb"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not a notebook"):
        Template(path)
    checkout.example()
    with pytest.raises(FileNotFoundError, match="known chapters: broken, example"):
        Template(checkout.root / "notebooks/absent.ipynb")
