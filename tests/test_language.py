"""Docstrings and comments start with a verb or the name of a thing, not with a relative clause or a pronoun."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("topr_trl", "tests", "benchmarks", "examples", "scripts")
NEVER_FIRST = {"What", "Of", "Those", "Which", "How", "Its", "Their"}  # also in comments
NEVER_FIRST_IN_DOCSTRINGS = NEVER_FIRST | {"That", "Where", "Why", "When", "It", "They"}
# Parsing takes seconds, so parse only files in which one of the words follows a quote or the sign of a comment.
MAY_START = re.compile(rf"""["'#]\s*\\?\s*({"|".join(NEVER_FIRST_IN_DOCSTRINGS)})\b""")
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


def starts_badly(text):
    """Return the docstrings and comments of a module that start with one of the words."""
    if not MAY_START.search(text):
        return []
    bad = [docstring for docstring in docstrings(text) if starts_with(docstring, NEVER_FIRST_IN_DOCSTRINGS)]
    return bad + [comment for comment in comments(text) if starts_with(comment, NEVER_FIRST)]


def test_first_words():
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        bad = starts_badly(path.read_text(encoding="utf-8"))
        found += [f"{path.relative_to(ROOT)}: {each.splitlines()[0]}" for each in bad]
    assert not found


def test_all_docstrings_and_comments_are_found():
    written = ['"""It is."""', '"""\nThat is."""', '"""\\\n  Why\nis."""', "# Which\n", "x = 1\n#   What is\n", "'Of'"]
    assert [len(starts_badly(text)) for text in written] == [1] * 6
    assert not starts_badly('"""Return it."""\n# Return what it is')
    nested = 'class A:\n    """Those."""\n    def f(self):\n        """Of."""\n        # What\n        # follows\n'
    assert [text.split(".")[0] for text in docstrings(nested)] == ["Those", "Of"]
    assert list(comments(nested)) == ["What"]
