"""Blank out matches of regular expressions before the recorder stores text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

BLANK = "[redacted]"


class Redactor:
    r"""Callable that blanks out all matches of some patterns in the text of a JSON value.

    Args:
        patterns (`Sequence[str]`): Regular expressions.

    Raises:
        ValueError: a pattern is not a regular expression.

    Example:

        >>> Redactor([r"sk-\w+"])({"key": "sk-123"})
        ({'key': '[redacted]'}, True)
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns: list[re.Pattern[str]] = []
        for pattern in patterns:
            try:
                self._patterns.append(re.compile(pattern))
            except re.error as error:
                raise ValueError(f"redact: {pattern!r} is not a regular expression: {error}.") from None

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __call__(self, value: Any) -> tuple[Any, bool]:
        """Return the value with `BLANK` for each match, and whether there was a match.

        Args:
            value (`Any`): JSON value. Numbers do not change.
        """
        if not self._patterns:
            return value, False
        if isinstance(value, str):
            count = 0
            for pattern in self._patterns:
                value, more = pattern.subn(BLANK, value)
                count += more
            return value, count > 0
        if isinstance(value, Mapping):
            pairs = [(self(name), self(inner)) for name, inner in value.items()]
            found = {name: inner for (name, _), (inner, _) in pairs}
            return found, any(hit for pair in pairs for _, hit in pair)
        if isinstance(value, list) and not all(isinstance(inner, int | float) for inner in value):
            items = [self(inner) for inner in value]
            return [inner for inner, _ in items], any(hit for _, hit in items)
        return value, False


def without_tokens(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response without token ids and log-probabilities, which would reveal blanked-out text.

    Args:
        response (`Mapping[str, Any]`): Answer of the server.
    """
    hidden = ("prompt_token_ids", "token_ids", "logprobs", "prompt_logprobs")
    found = {name: value for name, value in response.items() if name not in hidden}
    if isinstance(choices := response.get("choices"), list):
        found["choices"] = [{name: value for name, value in choice.items() if name not in hidden} for choice in choices]
    return found
