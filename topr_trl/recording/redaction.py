"""Blank out matches of regular expressions in text that the recorder stores, and secrets in error messages."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote_plus

BLANK = "[redacted]"
_SECRET_HEADER = re.compile("auth|cookie|key|secret|session|token", re.IGNORECASE)
_STRING = re.compile(r'("[^"\\]*(?:\\.[^"\\]*)*")', re.DOTALL)  # string of JSON
_SHORTEST_SECRET = 7  # characters. Shorter values, such as "Bearer" or a version, can be words of an error.

# Patterns by name. Each of them takes time in proportion to the length of the text. A plain number without `+`,
# parentheses or groups does not count as a phone number, because answers have many plain numbers.
NAMED = {
    "emails": r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
    "phones": r"\+\d{1,3}(?:[ ().\-/]{0,2}\d){6,14}(?!\d)|\(\d{2,5}\)[ -]?\d{3,4}[ .-]?\d{3,4}(?!\d)"
    r"|(?<![\w.-])\d{3}[ .-]\d{3}[ .-]\d{4}(?![\w-])|(?<![\w.-])0\d{1,4}[ /-]\d{3,8}(?:[ -]\d{2,4}){0,3}(?![\w-])",
    "keys": r"(?<![\w-])(?:(?:sk|pk|rk)[-_][\w-]{16,256}|hf_\w{16,64}|gh[pousr]_\w{16,255}|github_pat_\w{16,255}"
    r"|glpat-[\w-]{16,64}|xox[a-z]-[\w-]{10,256}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,40}"
    r"|eyJ[\w-]{8,4000}\.[\w-]{8,8000}\.[\w-]{8,2000}|[Bb]earer [\w.~+/=-]{16,4000})"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,8000}-----END [A-Z ]{0,40}PRIVATE KEY-----",
}


class Redactor:
    r"""Callable that blanks out all matches of some patterns in the text of a JSON value.

    Args:
        patterns (`Sequence[str]`): Regular expressions, or names in `NAMED`, such as `emails`.

    Raises:
        ValueError: a pattern is not a regular expression, or is a word that is almost a name in `NAMED`.

    Example:

        >>> Redactor([r"sk-\w+"])({"key": "sk-123"})
        {'key': '[redacted]'}
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns: list[re.Pattern[str]] = []
        for pattern in patterns:
            similar = get_close_matches(pattern.lower(), NAMED, 1)
            if similar and pattern not in NAMED and pattern.isalpha():
                raise ValueError(
                    f"redact: {pattern!r} is not the name of a pattern. Did you mean {similar[0]}? To blank out the "
                    f"word {pattern} itself, use {f'({pattern})'!r}."
                )
            try:
                self._patterns.append(re.compile(NAMED.get(pattern, pattern)))
            except re.error as error:
                raise ValueError(f"redact: {pattern!r} is not a regular expression: {error}.") from None

    def _in_part(self, part: str) -> str:
        r"""Redact a string of JSON after parsing it: the letter of an escape such as `\n` is no part of a key."""
        if _STRING.fullmatch(part):
            with suppress(ValueError, RecursionError):
                text = json.loads(part)
                found = self(text)
                return part if found == text else json.dumps(found, ensure_ascii=False)
        for pattern in self._patterns:
            if pattern.pattern in NAMED.values():
                part = pattern.sub(BLANK, part)
        return part

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __call__(self, value: Any) -> Any:
        """Return the value with `BLANK` for each match. Without a match, the result equals the value.

        Args:
            value (`Any`): JSON value. Numbers do not change. Names of fields count as text. In text with JSON,
                patterns first look for matches in the parsed strings.
        """
        if not self._patterns:
            return value
        if isinstance(value, str):
            text = "".join(map(self._in_part, _STRING.split(value)))
            for pattern in self._patterns:
                if pattern.pattern not in NAMED.values():  # Other patterns may be for JSON itself.
                    text = pattern.sub(BLANK, text)
            return text
        if isinstance(value, Mapping):
            found: dict[Any, Any] = {}
            for given, inner in value.items():
                name = self(given)
                found[f"{name} {len(found) + 1}" if name in found else name] = self(inner)  # Names can become equal.
            return found
        if isinstance(value, list) and not all(isinstance(inner, int | float) for inner in value):
            return [self(inner) for inner in value]
        return value


def without_secrets(message: str, query: str, headers: Mapping[str, str], keys: Sequence[str | None]) -> str:
    """Return an error message without the values of a request that can be secrets.

    Errors of the HTTP client and of the server can repeat the URL or a header.

    Args:
        message (`str`): Error message.
        query (`str`): Query string of the request.
        headers (`Mapping[str, str]`): Headers of the request. Headers for keys, tokens and cookies count as secrets.
        keys (`Sequence[str | None]`): Secrets of the recorder, such as its token. None stands for a missing secret.
    """
    texts = [query, *(value for name, value in headers.items() if _SECRET_HEADER.search(name))]
    message = message.replace(f"?{query}", f"?{BLANK}") if query else message
    found = {query, *(key for key in keys if key), *(value for text in texts for value in _values(text))}
    for secret in sorted(found, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            message = message.replace(secret, BLANK)
    return message


def _values(text: str) -> Iterator[str]:
    """Yield each value in a query string or a header, first unchanged and then decoded."""
    for part in re.split(r"[&;,\s]+", text):
        value = part.partition("=")[2]
        value = value if value.strip("=") else part  # `=` can also be the padding of base64.
        yield from (value, unquote_plus(value))


def without_tokens(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response without token ids and log-probabilities, which would reveal blanked-out text.

    Args:
        response (`Mapping[str, Any]`): Answer of the server.
    """
    return {
        name: [without_tokens(each) if isinstance(each, Mapping) else each for each in value]
        if name in _WITH_TOKENS and isinstance(value, list)
        else value
        for name, value in response.items()
        if name not in _TOKENS
    }


_TOKENS = {"prompt_token_ids", "token_ids", "logprobs", "prompt_logprobs", "input_messages", "output_messages"}
_WITH_TOKENS = {"choices", "output", "content"}  # lists of objects that can have tokens
