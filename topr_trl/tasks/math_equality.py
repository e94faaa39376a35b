r"""Compare two answers in LaTeX.

Tuples, intervals, lists, sets, unions and matrices are compared part by part. Numbers are compared as exact fractions,
and text as words. Units are optional, but answers with different units differ. math-verify compares only the remaining
parts, because it makes these mistakes:

- It reads (2, 1) and (3, 1) as empty intervals, and so as equal.
- It reads 34_5 and 34_6 as 34.
- It does not distinguish R from r.
- It accepts 0.3333333 for a third.
- It reads 3m, which is 3 times m, as 3 meters.

The module runs in the processes of `topr_trl.sandbox.worker_pool`, because a power tower can make a comparison hang. It
does not import PyTorch, so a process starts quickly.
"""

import re
from fractions import Fraction
from functools import lru_cache
from math import comb, prod
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import verify

_LAYOUT = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])|\\(?:displaystyle|textstyle|limits|boldsymbol|mathbf|bf|bm)(?![a-zA-Z])"
    r"|(?<=\\\\)\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm)\s*\]"  # the distance in a line break of a matrix
)
_SPACE = re.compile(r"(?<!\\)\\(?:[!,;: ]|q?quad(?![a-zA-Z]))|~|\s+")
_THIN_THOUSANDS = re.compile(r"(?<=\d)(?:,\s*\\!|(?<!\\)\\[,;:! ]|\{,\}|~)+\s*(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(
    r"(?:^|(?<==)|(?<== ))[-+]?(?:\d+/)?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:$|(?=\\(?:pi|sqrt|frac)))"
    r"|(?<=[^\\]\{)\d{1,3}(?:,\d{3})+(?=\})"  # as in \frac{1}{1,024}
)
_SPACED_THOUSANDS = re.compile(r"\d{1,3}(?: \d{3})+")
_CURRENCY = re.compile(r"\\\$|[$€£]|\\(?:text|mathrm|mbox)\{\s*(?:USD|Rs\.?)\s*\}")
_WORD = r"\\(?:text(?:rm|bf|it|normal)?|mbox|hbox|mathrm|rm)"
_POWER = r"(?:\^(?:\{\d\}|\d))?"
_BARE_UNITS = (
    "mm|cm|km|kg|mg|ft|yd|lb|mph|sec|min|hr|inch(?:es)?|foot|feet|yards?|miles?|met(?:er|re)s?|lit(?:er|re)s?|grams?|"
    "degrees?|radians?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|cents?|dollars?|units?|points?|people|"
    "students?|ways|square|cubic|sq|per"
)
_TEXT_UNIT = re.compile(rf"(?<=[\d\w}})\]])\s*{_WORD}\s*\{{(?P<words>[^{{}}]*)\}}{_POWER}\s*\.?$")
_BARE_UNIT = re.compile(rf"(?<=[\d}})])\s*(?:{_BARE_UNITS})(?:\s+(?:{_BARE_UNITS}))*{_POWER}\s*\.?$")
_DEGREES = re.compile(r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°|\\degree)\s*$")
_PERCENT = re.compile(r"(?:\\?%|\bpercent)\s*$")
# Words and single letters that change the meaning of a preceding number, so they are not units.
_MEANS_SOMETHING = re.compile(
    r"\b(?:(?i:and|or|hundred|thousand|million|billion|trillion|dozen|mod|base|if|when|for|more|less|fewer|least|most|pi|"
    r"factorial|squared|cubed|north|south|east|west|[ap]\.?m)|(?![mMsghlLCFNJVWK]\b)[a-zA-Z])\b(?!\^)"
)
# A time of day: 3 PM, 3:00 p.m. or 3 \text{pm}. Text without a space, periods or capitals, such as 3am, is a product.
_HALF_DAY = re.compile(
    rf"(?<=\d)(?::00)?(?:\s*{_WORD}\s*\{{\s*(?P<text>[AaPp])\.?\s?[Mm]\.?\s*\}}|\s+(?P<word>[AaPp])\.?\s?[Mm]\.?|"
    r"(?P<capital>[AP])M|(?P<period>[AaPp])\.\s?[Mm]\.)$"
)
_ALL_REALS = re.compile(r"\\mathbb\s*(?:\{R\}|R)|\\(?:Reals|R)(?![a-zA-Z])|\\text\{\s*all real numbers\s*\}")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|arc|log|ln)")
# Name of a point, vector, matrix, set or interval, such as "A=" in "A = (8, -2)".
_NAME = re.compile(
    r"^(?:\\?[a-zA-Z]+|(?:\\(?:vec|overrightarrow|mathcal))?\{[a-zA-Z]+\}|\(\\?[a-zA-Z]+(?:,\\?[a-zA-Z]+)+\))="
    r"(?=[(\[]|\\\{|\\begin)"
)
_UNICODE = str.maketrans({"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ",
                          "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∈": r"\in ", "√": r"\sqrt ",
                          "±": r"\pm "})  # fmt: skip


def normalize(text: str) -> str:
    r"""Return an answer in a uniform notation.

    Layout commands, extra spaces, currency, units, degree signs and thousands separators are removed.

    Args:
        text (`str`): Answer in LaTeX.
    """
    text = _THIN_THOUSANDS.sub("", text.translate(_UNICODE).strip())
    text = _SPACE.sub(" ", _LAYOUT.sub("", _CURRENCY.sub("", text))).strip()
    text = _ALL_REALS.sub(r"(-\\infty,\\infty)", text)
    text = re.sub(rf"\s*,?\s*{_WORD}\s*\{{\s*(?:,?\s*and|,?\s*or|,)\s*\}}\s*", ", ", text)
    # Do not split at an "or" in \text{}, because "3 \text{ or more}" is not a list.
    text = re.sub(rf"({_WORD}\s*\{{[^{{}}]*\}})|\s*,?\s+(?:and|or)\s+", lambda match: match[1] or ", ", text)
    text = _HALF_DAY.sub(lambda match: rf"\text{{{match[match.lastgroup].lower()}m}}", text)  # type: ignore[index]
    text = text.removesuffix(".").strip()
    text = re.sub(rf"{_WORD}\s*\{{\s*([ie]|[-+]?[\d.,]*\d)\s*\}}", r"\1", text)
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    # `_structure` removes the units of a list from each part.
    if not re.search(r"[,;]\s", text) or len(_split(text, (",", ";"))) == 1:
        text = _without_unit(text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*", "", text)
    text = re.sub(r"\\(?:ge|geqslant)(?![a-zA-Z])", r"\\geq", re.sub(r"\\(?:le|leqslant)(?![a-zA-Z])", r"\\leq", text))
    text = re.sub(r"\\l(?:brace|bracket)|\\langle", lambda m: r"\{" if "brace" in m[0] else "(", text)
    text = re.sub(r"\\r(?:brace|bracket)|\\rangle", lambda m: r"\}" if "brace" in m[0] else ")", text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"\\varnothing|\\\{\s*\\\}", r"\\emptyset", text)
    text = re.sub(r"\s*([,;=<>+&|/()\[\]])\s*", r"\1", text).strip()
    return _NAME.sub("", text)


# Words and powers after a number that make equal numbers different answers. Semicolons separate groups of words with
# the same meaning.
_MEANINGS = """mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; in inch
inche; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; lb pound; oz ounce; s sec second; min
minute; h hr hour; day; week; month; year; cent; dollar usd; ml milliliter millilitre; l liter litre; degree; radian;
^2 square sq; ^3 cubic; yes; no; true; false; left; right; up; down; above; below; over; under; before; after;
early; late; gain; loss losse; profit; win; boy; girl; man men; woman women; male; female; odd; even; bc bce; ad ce;
heads; tails; clockwise; counterclockwise; increase; decrease; positive; negative; forward; backward; inside; outside"""
_MEANING = {word: line.split()[0] for line in _MEANINGS.split(";") for word in line.split()}


def meanings(text: str) -> set[str]:
    r"""Return the meanings of the units and other known words that `normalize` removes after a number.

    Words with the same meaning have the same entry: "m" for "meters". `normalize` removes these words because most
    answers are right even without a unit.

    Args:
        text (`str`): Answer in LaTeX.
    """
    whole = _SPACE.sub(" ", _LAYOUT.sub("", text)).strip()
    tail = re.sub(r"\\[a-zA-Z]+", "", whole[len(_without_unit(whole)) :]).casefold() + " dollar" * (r"\$" in text)
    words = re.findall(r"[a-z]+|\^\d", tail.replace("{", "").replace("mph", "mi h"))
    singular = (word if word in _MEANING else word.removesuffix("s") for word in words)
    return {_MEANING[word] for word in singular if word in _MEANING}


def contradict(given: str, truth: str) -> bool:
    r"""Return whether two answers have different units or opposite words after their numbers, such as 3 m and 3 cm.

    Words that only one of the answers has are not a contradiction.

    Args:
        given (`str`): Answer of a completion, in LaTeX.
        truth (`str`): Correct answer.
    """
    a, b = meanings(given), meanings(truth)
    return not (a <= b or b <= a)


def _without_unit(text: str) -> str:
    for _ in range(3):  # Some units have several parts: "5 \text{ square} \text{ cm}", "60^\circ \text{ C}".
        text = text.removesuffix(".").strip()
        found = _TEXT_UNIT.search(text)
        if found and not _MEANS_SOMETHING.search(found["words"]) and re.search(r"\d|\\pi", text[: found.start()]):
            text = text[: found.start()].rstrip()
        text = _BARE_UNIT.sub("", text)
        text = text if _TRIGONOMETRY.search(text) else _DEGREES.sub("", text).rstrip()
    return text


_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_NUMBERS = tuple(
    re.compile(r"(?P<sign>[-+]?)\s*" + pattern)
    for pattern in (
        rf"(?P<top>{_DECIMAL})(?:\s*/\s*(?P<bottom>{_DECIMAL}))?",
        rf"\((?P<top>[-+]?{_DECIMAL})\)(?:\s*/\s*\(?(?P<bottom>{_DECIMAL})\)?)?",
        rf"\\frac\s*\{{\s*(?P<top>[-+]?\s*{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>[-+]?\s*{_DECIMAL})\s*\}}",
        r"(?P<whole>\d+)\s*\\frac\s*\{\s*(?P<top>\d+)\s*\}\s*\{\s*(?P<bottom>\d+)\s*\}",
        r"(?P<whole>\d+)\s+(?P<top>\d+)/(?P<bottom>\d+)",
        rf"(?:(?P<top>{_DECIMAL})\s*(?:\\times|\\cdot|\*)\s*)?10\^(?:\{{(?P<power>[-+]?\d{{1,3}})\}}|(?P<digit>\d))",
        r"(?P<top>\d*\.\d*)\\overline\s*\{(?P<repeated>\d+)\}",
    )
)


def as_number(text: str) -> Fraction | None:
    """Return the exact value of a number, or None for other text and for the denominator 0.

    A number is an integer, a decimal, a fraction, a mixed number, a repeating decimal, or a product such as `2 * 10^3`.

    Args:
        text (`str`): Normalized answer.
    """
    for pattern in _NUMBERS:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        part = {name: (value or "").replace(" ", "") for name, value in match.groupdict().items()}
        # A missing numerator is 1 in "10^3", and 0 in ".\overline{3}".
        value = Fraction(part["top"] if part.get("top") not in ("", ".", None) else int("power" in part))
        if digits := part.get("repeated"):
            places = len(part["top"].partition(".")[2])
            value += Fraction(int(digits), 10**places * (10 ** len(digits) - 1))
        if part.get("bottom"):
            if Fraction(part["bottom"]) == 0:
                return None
            value /= Fraction(part["bottom"])
        value += int(part.get("whole") or 0)
        value *= Fraction(10) ** int(part.get("power") or part.get("digit") or 0)
        return -value if part["sign"] == "-" else value
    return None


_OPENING, _CLOSING = "([{", ")]}"


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Split at separators that are outside all brackets and LaTeX environments."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text.startswith((r"\begin{", r"\end{"), i):
            depth += 1 if text[i + 1] == "b" else -1
        if text[i] in _OPENING:
            depth += 1
        elif text[i] in _CLOSING:
            depth -= 1
        separator = next((s for s in separators if text.startswith(s, i)), None) if depth == 0 else None
        if separator is not None:
            parts.append(text[start:i].strip())
            start = i + len(separator)
        i += len(separator or text[i])
    return [*parts, text[start:].strip()]


_BRACKETS = re.compile(r"([(\[])(.+)([)\]])|(\\\{)(.+)(\\\})", re.S)


def _outer_brackets(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the content and the closing bracket if one pair encloses the text, or else None."""
    match = _BRACKETS.fullmatch(text)
    if match is None:
        return None
    opening, content, closing = (group for group in match.groups() if group is not None)
    depth = 0
    for letter in content:
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if depth < 0:  # The first bracket is closed before the end.
            return None
    return (opening, content.strip(), closing) if depth == 0 else None


_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?((?:(?!\\begin).)*)\\end\{\1\}")

_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")

# Kind and parts of an answer:
# ("atom", text), ("list" or "set" or "union", parts), ("tuple", brackets, parts), ("matrix", rows)
Structure = tuple[Any, ...]


def _structure(text: str) -> Structure:
    """Parse a normalized answer into its kind and its parts. An answer without parts is an atom, without its unit."""
    if match := _MATRIX.fullmatch(text):
        rows = [row.strip() for row in re.split(r"\\\\", match[2]) if row.strip()]
        return ("matrix", [_split(row, ("&",)) for row in rows])
    if len(parts := _split(text, (r"\cup",))) > 1:
        return ("union", parts)
    if len(parts := _split(text, (",", ";"))) > 1:
        return ("list", parts)
    text = _without_unit(text)
    if outer := _outer_brackets(text):
        opening, inner, closing = outer
        parts = _split(inner, (",", ";"))
        if opening == r"\{":
            return ("set", parts)
        if len(parts) > 1:
            return ("tuple", opening + closing, parts)
        if opening + closing == "()":
            return _structure(inner)
    if _PLUS_MINUS.search(text):
        plus = _PLUS_MINUS.sub(lambda match: "+" if match[1] == "pm" else "-", text)
        minus = _PLUS_MINUS.sub(lambda match: "-" if match[1] == "pm" else "+", text)
        return ("list", [re.sub(r"^\+|(?<==)\+", "", plus), minus])
    return ("atom", text)


def _elements(structure: Structure) -> list[str]:
    """Return the elements of a list or set. An element with `±` counts as two. An atom is its only element."""
    if structure[0] == "atom":
        return [structure[1]]
    parts: list[str] = []
    for part in structure[-1]:
        inner = _structure(part)
        parts += inner[1] if inner[0] == "list" else [part]
    return parts


def same(given: str, truth: str) -> bool:
    """Return whether two normalized answers are equal.

    Args:
        given (`str`): Answer of a completion.
        truth (`str`): Correct answer.

    Raises:
        ValueError: a part of `given` cannot be parsed.
    """
    if given == truth:
        return True
    a, b = _structure(given), _structure(truth)
    kinds = {a[0], b[0]}
    if kinds == {"atom"}:
        # In a tuple, 30^\circ equals both 30 and \pi/6.
        equal = _same_atoms(a[1], b[1]) or (r"\circ" in given + truth and _same_by_math_verify(given, truth))
        return equal and not contradict(given, truth)
    if kinds == {"tuple"}:
        return bool(a[1] == b[1]) and _same_in_order(a[2], b[2])
    if kinds <= {"list", "set", "atom"}:
        return _same_in_any_order(_elements(a), _elements(b))
    if kinds == {"tuple", "list"}:  # "3, 5" is the same as (3, 5).
        return "()" in (a[1], b[1]) and _same_in_order(a[-1], b[-1])
    if kinds == {"list", "union"}:  # For example, "x < 1 or x > 3".
        return _same_in_any_order(a[1], b[1])
    if kinds in ({"union"}, {"union", "tuple"}):
        return _same_by_math_verify(given, truth)
    if kinds == {"matrix"}:
        return len(a[1]) == len(b[1]) and all(_same_in_order(x, y) for x, y in zip(a[1], b[1], strict=True))
    if kinds == {"matrix", "tuple"}:  # A vector can be written as a matrix or as a tuple.
        (_, rows), (_, brackets, parts) = (a, b) if a[0] == "matrix" else (b, a)
        cells = [cell for row in rows for cell in row]
        if not rows or brackets != "()" or 1 not in (len(rows), len(rows[0])):
            return False
        return _same_in_order(cells, parts) if a[0] == "matrix" else _same_in_order(parts, cells)
    if kinds == {"matrix", "atom"}:
        return _same_by_math_verify(given, truth)  # The atom can be a number times a matrix.
    if kinds <= {"atom", "tuple", "union"} and re.search(r"[<>]|\\[gl]eq|\\neq?(?![a-z])|\\setminus", given + truth):
        return _same_by_math_verify(given, truth)  # For example, x > 3 is the same as (3, \infty).
    return False


def _same_in_order(given: list[str], truth: list[str]) -> bool:
    return len(given) == len(truth) and all(same(a, b) for a, b in zip(given, truth, strict=True))


def _same_in_any_order(given: list[str], truth: list[str]) -> bool:
    if len(given) != len(truth):
        return False
    left = list(truth)
    for a in given:
        match = next((i for i, b in enumerate(left) if same(a, b)), None)
        if match is None:
            return False
        del left[match]
    return True


_BASED = re.compile(r"\(?0*(?P<digits>[\dA-F]+)\)?_(?:\{(?P<b>\d+)\}|(?P<c>\d+))")
_TEXT = re.compile(rf"{_WORD}\s*\{{([^{{}}]*)\}}|([A-Z]{{3,}})")
_BARE_WORDS = re.compile(r"\(?[A-Za-z][A-Za-z' -]*\)?")
_NUMBER_IN_TEXT = re.compile(rf"{_WORD}\s*\{{\s*([-+]?[\d.,]*\d)(\s[^{{}}\d]*)\}}")
# latex2sympy reads 2(3), 2(\frac{1}{2}) and 6\binom{5}{2} as mixed numbers, so it adds the factors.
_PRODUCT = re.compile(
    r"((?<![\^_\d.])\d+(?:\.\d+)?|\)|\\[dt]?binom\{[^{}]*\}\{[^{}]*\})"
    r"\s*(?=\((?:\d[\d.]*|\\frac\{\d+\}\{\d+\}|\d+/\d+)\)|\\[dt]?binom)"
)


def _digits_and_base(text: str) -> tuple[str, int] | None:
    """Return the digits and the base of a number such as 204_5. Return None for other text."""
    match = _BASED.fullmatch(text)
    return (match["digits"], int(match["b"] or match["c"])) if match else None


def _words_in_text(text: str) -> str | None:
    r"""Return the words of \text{}, or an order such as BAC. Return None for other text.

    The words are in lower case, without periods, a leading article, or the parentheses of `(B)`.
    """
    match = _TEXT.fullmatch(text)
    return (_normalize_words(match[1] or match[2] or "") or None) if match else None


def _normalize_words(words: str) -> str:
    words = " ".join(words.casefold().replace(".", " ").split()).strip("() ")
    return re.sub(r"^(?:an?|the) ", "", words)


def _same_atoms(given: str, truth: str) -> bool:
    percent = [bool(_PERCENT.search(text)) for text in (given, truth)]
    if any(percent):
        bare = [normalize(_PERCENT.sub("", text)) for text in (given, truth)]
        if same(*bare):  # Accept 50 for 50%, because the question may ask for a percentage.
            return True
        x, y = map(as_number, bare)
        return x is not None and y is not None and x * (100 if percent[1] else 1) == y * (100 if percent[0] else 1)
    if (x := as_number(given)) is not None and (y := as_number(truth)) is not None:
        return x == y
    if _digits_and_base(given) or _digits_and_base(truth):
        return _digits_and_base(given) == _digits_and_base(truth)
    words = _words_in_text(given), _words_in_text(truth)
    if words[0] is not None or words[1] is not None:
        a, b = (w if w is not None else _normalize_words(t) if _BARE_WORDS.fullmatch(t) else None
                  for w, t in zip(words, (given, truth), strict=True))  # fmt: skip
        return bool(a) and a == b
    return _same_by_math_verify(given, truth)


@lru_cache(maxsize=256)
def parse_formula(text: str) -> Any:
    """Parse a formula into a SymPy object.

    Args:
        text (`str`): Formula in LaTeX.

    Raises:
        ValueError: the formula cannot be parsed, or has no value, such as 1/0.
    """
    if re.search(r"(?<![_\d.])\d[\d.]*\s+[\d.]", text) or not re.search(r"[a-zA-Z\d]", text):
        raise ValueError(f"not a formula: {text!r}")
    imaginary = re.search(r"(?<![a-zA-Z])i(?![a-zA-Z])|\di(?![a-zA-Z])|\\i(?:math)?(?![a-zA-Z])", text)
    try:
        parsed = latex2sympy(
            _PRODUCT.sub(r"\1\\cdot ", text),
            is_real=not imaginary,
            convert_degrees=True,
            # `units` would remove the m from 3m as a unit. `malformed_operators` can match across braces.
            normalization_config=NormalizationConfig(
                basic_latex=True, units=False, malformed_operators=False, nits=True, boxed="none", equations=False
            ),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception as error:
        raise ValueError(f"not a formula: {text!r}") from error
    if parsed is None or parsed in (sympy.nan, sympy.zoo):
        raise ValueError(f"no value: {text!r}")
    if imaginary:
        parsed = parsed.subs({s: sympy.I for s in parsed.free_symbols if s.name == "i"})
    return parsed


def _same_by_math_verify(given: str, truth: str) -> bool:
    a = parse_formula(given)
    try:
        b = parse_formula(truth)
    except ValueError:
        return False
    if "matrix}" in given + truth:
        a, b = a.doit(), b.doit()
    if _differ_at_a_point(a, b):  # This check is fast, and math-verify would expand both formulas first.
        return False
    # With 12 decimals, 0.333333 is not a third. There is no timeout, because the worker pool limits the time.
    equal = bool(verify(b, a, float_rounding=12, timeout_seconds=None, allow_set_relation_comp=True))
    return equal and _are_close(a, b)


def _differ_at_a_point(a: Any, b: Any) -> bool:
    """Return whether two formulas with symbols have clearly different values at a point with positive coordinates."""
    if not all(isinstance(x, sympy.Expr) for x in (a, b)):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return False
    point = {symbol: sympy.Rational(7 + 3 * i, 5 + 2 * i) for i, symbol in enumerate(symbols)}
    x, y = (sympy.N(formula.subs(point), 15) for formula in (a, b))
    return bool(x.is_number and y.is_number and x.is_finite and y.is_finite and abs(x - y) > 1e-6 * (abs(x) + abs(y)))


def _are_close(a: Any, b: Any) -> bool:
    """Return whether two values agree in their leading digits. For formulas with symbols, return True without a check.

    math-verify compares rounded values. Rounded to 12 decimals, 2^-98 and 2^-99 are both 0.
    """
    if not all(isinstance(x, sympy.Expr) and not x.free_symbols for x in (a, b)):
        return True
    a, b = sympy.N(a, 30), sympy.N(b, 30)
    apart = a != b and abs(a - b) > 1e-11 * abs(b)
    return apart not in (True, sympy.true)  # If SymPy cannot decide, accept the result of math-verify.


def _check_readable(text: str) -> None:
    """Raise a ValueError if a part of an answer cannot be parsed."""
    structure = _structure(text)
    if structure[0] == "atom":
        atom = _PERCENT.sub("", structure[1]).strip()
        if _exact_form(atom) is None:
            parse_formula(atom)
        return
    for part in structure[-1]:
        for cell in part if isinstance(part, list) else [part]:
            _check_readable(cell)


# Maximum number of terms of an expanded formula, and of characters that expanding adds. A formula that
# exceeds a limit keeps its original text.
_MOST_TERMS = 200


def canonical_answer(text: str) -> str:
    """Return a form of an answer that equal answers usually share, for counting votes.

    Args:
        text (`str`): Normalized answer.
    """
    structure = _structure(text)
    if structure[0] == "tuple":
        return structure[1][0] + ", ".join(map(canonical_answer, structure[2])) + structure[1][1]
    if structure[0] in ("list", "set"):
        return ", ".join(sorted(map(canonical_answer, _elements(structure))))
    if structure[0] == "union":
        return " U ".join(sorted(map(canonical_answer, structure[1])))
    if structure[0] == "matrix":
        return "[" + ", ".join("[" + ", ".join(map(canonical_answer, row)) + "]" for row in structure[1]) + "]"
    atom = re.sub(r"^[a-zA-Z]=", "", _PERCENT.sub("", structure[1]).strip())
    return _exact_form(atom) or _canonical_formula(atom)


def _exact_form(atom: str) -> str | None:
    """Return the canonical form of a number, with or without a base, or of words. Return None for a formula."""
    if (value := as_number(atom)) is not None:
        return str(value)
    if based := _digits_and_base(atom):
        return f"{based[0]}_{based[1]}"
    return _words_in_text(atom)


def _canonical_formula(text: str) -> str:
    """Return the expanded formula, or the text itself if it cannot be parsed or expanding it would be slow."""
    try:
        parsed = parse_formula(text)
        powers = [power.exp for power in parsed.atoms(sympy.Pow)]
        slow = parsed.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative, sympy.factorial)
        if slow or any(e.is_number and not (e.is_Rational and abs(e) <= 10) for e in powers):
            return text
        terms = [
            comb(len(power.base.args) + int(power.exp) - 1, int(power.exp))
            for power in parsed.atoms(sympy.Pow)
            if power.base.is_Add and power.exp.is_Integer and power.exp > 0
        ]
        if prod(terms) > _MOST_TERMS:
            return text
        form = str(sympy.expand(parsed.doit()))
        return form if len(form) <= len(text) + _MOST_TERMS else text
    except Exception:
        return text


def judge(pair: list[str]) -> list[str | None]:
    """Return the verdict on an answer, and the canonical form of an incorrect answer.

    Args:
        pair (`list[str]`): Answer of a completion, and the correct answer. The caller limits their length.

    Returns:
        `["correct", None]`, `["incorrect", canonical form]` or `["invalid", None]`. An answer is invalid if it is
        empty, or if it cannot be parsed and is not literally equal to the correct answer.
    """
    # Read "\text{10 days}" as "10\text{ days}".
    given, truth = (_NUMBER_IN_TEXT.sub(r"\1\\text{\2}", text.strip()) for text in pair)
    if not re.search(r"[^\s{}()\[\]$.,;]", given):
        return ["invalid", None]
    are_contrary = contradict(given, truth)
    given, truth = normalize(given), normalize(truth)
    try:
        if same(given, truth) and not are_contrary:
            return ["correct", None]
        _check_readable(given)
    except (ValueError, RecursionError, MemoryError, OverflowError):
        return ["invalid", None]
    return ["incorrect", canonical_answer(given)]
