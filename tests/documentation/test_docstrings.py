"""Docstrings of public names describe every parameter, and nothing else as one; all docstrings have one markup."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import dsq_ckpt
from tests.helpers.processes import ROOT

INTERFACES = (dsq_ckpt.DSQStorageWriter, dsq_ckpt.DSQStorageReader)
"""Classes whose methods PyTorch calls and documents."""
OTHER_MARKUP = re.compile(r"``|[a-z`)]\.  [A-Z`]")
"""Code in double backquotes, or two spaces between sentences."""


def iterate_public() -> Iterator[tuple[str, Any]]:
    """Yield functions, classes, and the methods of classes that docs/api.md lists or users call."""
    for name in dsq_ckpt.__all__:
        value = getattr(dsq_ckpt, name)
        if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
            continue
        yield name, value
        if not isinstance(value, type) or value in INTERFACES:
            continue
        if value is dsq_ckpt.SaveHistory:  # its other methods are called by saves and loads
            yield f"{name}.clear", value.clear
            continue
        for key, member in vars(value).items():
            function = member.__func__ if isinstance(member, classmethod) else member
            if not key.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield f"{name}.{key}", function


PUBLIC = dict(iterate_public())


def described(text: str) -> list[str]:
    """Return the names that `Args` and `Attributes` of a docstring describe, in order."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?)+)", inspect.cleandoc(text) + "\n", re.M)
    return [name for section in sections for name in re.findall(r"^ {4}(\w+): \S", section, re.M)]


def test_there_are_many() -> None:
    assert {"save", "async_save", "load", "compress", "Compressor", "Compressor.save", "DSQConfig"} <= set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_parameter_is_described(name: str) -> None:
    """In the order of the signature. A class describes those of its constructor."""
    parameters = [parameter for parameter in inspect.signature(PUBLIC[name]).parameters if parameter != "self"]
    parameters = [parameter for parameter in parameters if parameter != "cls"]
    assert described(PUBLIC[name].__doc__) == parameters


@pytest.mark.parametrize("name", PUBLIC)
def test_results_are_described(name: str) -> None:
    """By `Returns`, or by a first sentence that says what is returned."""
    returned = inspect.signature(PUBLIC[name]).return_annotation
    text = inspect.cleandoc(PUBLIC[name].__doc__)
    if not isinstance(PUBLIC[name], type) and returned not in (None, "None"):
        assert "\nReturns:\n    " in text or text.startswith(("Return a", "Return the", "Return numbers")), text


def test_markup_is_the_same_everywhere() -> None:
    """Code in single backquotes, as `default_role` of docs/conf.py has it, and one space between sentences."""
    found = []
    for folder in ("dsq_ckpt", "triton_kernels", "scripts", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            if not OTHER_MARKUP.search(source):  # parsing all files takes seconds
                continue
            for node in ast.walk(ast.parse(source)):
                if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
                    continue
                if isinstance(text := node.value.value, str) and OTHER_MARKUP.search(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
