"""Docstrings and comments start with a verb or the name of a thing, not with a relative clause or a pronoun."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("topr_trl", "tests", "benchmarks", "examples", "scripts")
NEVER_FIRST = {"What", "Of", "Those", "Which", "How", "Its", "Their"}  # also in comments
NEVER_FIRST_IN_DOCSTRINGS = NEVER_FIRST | {"That", "Where", "Why", "When", "It", "They"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def comments(text):
    """Yield the comments that have a line of their own, and do not continue a comment on the line before."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            if token.start[0] != last + 1:
                yield token.string.lstrip("# ")
            last = token.start[0]


def starts_with(text, words):
    return text.split()[:1] and text.split()[0] in words


def test_first_words():
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        bad = [docstring for docstring in docstrings(text) if starts_with(docstring, NEVER_FIRST_IN_DOCSTRINGS)]
        bad += [comment for comment in comments(text) if starts_with(comment, NEVER_FIRST)]
        found += [f"{path.relative_to(ROOT)}: {each.splitlines()[0]}" for each in bad]
    assert not found


def test_all_docstrings_and_comments_are_found():
    nested = 'class A:\n    """Those."""\n    def f(self):\n        """Of."""\n        # What\n        # follows\n'
    assert [text.split(".")[0] for text in docstrings(nested)] == ["Those", "Of"]
    assert list(comments(nested)) == ["What"]
