"""Notebook templates: the declared parameters, read without running anything."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from pydantic import TypeAdapter, ValidationError, create_model

from qsa_kernels.report import repository, yamlfile
from qsa_kernels.report.parameters import PARAMETERS, ChapterParameters, type_name, validated

_TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict}


class Template:
    """One notebook with its parameters cell.

    Args:
        path: the notebook.

    Raises:
        FileNotFoundError: no such notebook.
        ValueError: not a notebook, no or more than one cell tagged `parameters`, a default that is no plain value,
            or a parameters cell that disagrees with the chapter's model.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in (repository.root() / "notebooks").glob("*.ipynb")))
            raise FileNotFoundError(f"no notebook {path}; known chapters: {known or 'none'}")
        self.path = path.resolve()
        self.name = path.stem
        try:
            notebook = nbformat.read(path, as_version=4)
        except Exception as error:  # nbformat raises its own, JSON's and validation errors
            raise ValueError(f"{path}: not a notebook: {error}") from None
        cells = [
            (number, cell)
            for number, cell in enumerate(notebook.cells, start=1)
            if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", [])
        ]
        if len(cells) != 1:
            raise ValueError(f"{path}: expected one code cell with the tag 'parameters'; found {len(cells) or 'none'}")
        number, cell = cells[0]
        self.defaults, annotations = _declared(cell.source, f"{path}, cell {number}")
        fields: dict[str, Any] = {name: (annotations[name], ...) for name in self.defaults}
        self.model = PARAMETERS.get(self.name) or create_model("Parameters", __base__=ChapterParameters, **fields)
        if set(self.model.model_fields) != set(self.defaults):
            raise ValueError(
                f"{path}: the parameters cell declares {', '.join(sorted(self.defaults)) or 'nothing'}, "
                f"but {self.model.__name__} has {', '.join(sorted(self.model.model_fields)) or 'nothing'}"
            )

    def resolve(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters of the notebook, with `values` in place of its defaults.

        Raises:
            ValueError: names each unknown, mistyped or non-finite parameter, and what is allowed.
        """
        return validated(self.model, {**self.defaults, **values}, f"notebook {self.path.name}").model_dump()

    def parse(self, assignments: list[str]) -> dict[str, Any]:
        """Values of `key=value` texts, each read as YAML for the parameter's type.

        Raises:
            ValueError: no "=", an unknown key, a key given twice or a value of another type.
        """
        values: dict[str, Any] = {}
        for assignment in assignments:
            key, equals, text = assignment.partition("=")
            if not equals:
                raise ValueError(f"--set: expected key=value; got {assignment!r}")
            if key in values:
                raise ValueError(f"--set: parameter {key!r} is given twice")
            values[key] = self._parse_value(key, text)
        return values

    def _parse_value(self, key: str, text: str) -> Any:
        if key not in self.model.model_fields:
            self.resolve({key: text})
        field = self.model.model_fields[key]
        value = yamlfile.parse(text, f"--set {key}")
        annotation: Any = field.annotation
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        # A text such as 0123 or yes stays a text where the parameter is one.
        for candidate in (value, text):
            try:
                return adapter.validate_python(candidate, strict=True)
            except ValidationError:
                continue
        raise ValueError(f"--set: parameter {key!r}: expected {type_name(annotation)}; got {text!r}")


def _declared(source: str, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Defaults and types of the names that a parameters cell assigns."""
    defaults: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            name, value = statement.target.id, statement.value
            annotation = ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign) and [type(target) for target in statement.targets] == [ast.Name]:
            name, value, annotation = statement.targets[0].id, statement.value, ""  # type: ignore[attr-defined]
        else:
            raise ValueError(f"{where}: expected only lines `name: type = value`; got {ast.unparse(statement)!r}")
        try:
            defaults[name] = ast.literal_eval(value)
        except ValueError:
            raise ValueError(f"{where}: {name}: expected a plain value; got {ast.unparse(value)!r}") from None
        try:
            annotations[name] = eval(annotation, {"__builtins__": {}}, _TYPES) if annotation else type(defaults[name])
        except (NameError, TypeError, SyntaxError):
            raise ValueError(f"{where}: {name}: expected a type of {', '.join(_TYPES)}; got {annotation!r}") from None
    return defaults, annotations
