"""Docstrings of the package start with a verb or a noun, never with a question word, "Of", "Those" or "That"."""

import ast
from pathlib import Path

import topr_trl

PACKAGE = Path(topr_trl.__file__).parent
NEVER_FIRST = {"What", "Of", "Those", "That", "Which", "How", "Where", "Why", "When"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def test_first_words_of_docstrings():
    found = [
        f"{path.relative_to(PACKAGE)}: {docstring.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for docstring in docstrings(path.read_text(encoding="utf-8"))
        if docstring.split()[0] in NEVER_FIRST
    ]
    assert not found


def test_all_docstrings_are_found():
    nested = 'class A:\n    """Those."""\n    def f(self):\n        """Of."""\n'
    assert [text.split(".")[0] for text in docstrings(nested)] == ["Those", "Of"]
