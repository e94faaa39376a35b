"""Read the attributes of spans, which exporters write as lists, as objects, or with dots in their names."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any

from topr_trl.importing.format import Record
from topr_trl.importing.message_parts import parsed_json


def attributes_of(span: Record) -> Record:
    """Return the attributes of a span as an object with objects and lists inside.

    For instance, `llm.input_messages.0.message.role` becomes a field of the first item in the list
    `llm.input_messages`. If the name of an attribute is also the start of a longer name, the value of this attribute
    gets the name `""` inside the object.

    Args:
        span (`Record`): Span with `attributes`: a list as in OTLP, or an object. In tables, columns have names such as
            `attributes.llm.model_name`.
    """
    return nested(_given(span))


def missing_in(span: Record) -> list[str]:
    """Return the missing parts of a span: dropped attributes, and the first two missing items of each list.

    Args:
        span (`Record`): Span, see `attributes_of`.
    """
    dropped = span.get("droppedAttributesCount") or span.get("dropped_attributes_count")
    numbers = defaultdict[str, set[int]](set)
    for path in _given(span):
        names = str(path).split(".")
        for n, name in enumerate(names):
            if name.isdecimal() and n:
                numbers[".".join(names[:n])].add(int(name))
    gaps = [f"{path}.{n}" for path, found in numbers.items()
            for n in islice((n for n in range(max(found)) if n not in found), 2)]  # fmt: skip
    return [f"{dropped} attributes that were dropped", *gaps] if dropped else gaps


def _given(span: Record) -> Mapping[str, Any]:
    """Return the attributes of a span, whose names may have dots. Databases export them as JSON text."""
    given = parsed_json(span.get("attributes"))
    if given is None:
        prefix = "attributes."
        given = {name.removeprefix(prefix): value for name, value in span.items() if name.startswith(prefix)}
    return _plain(given)


def nested(given: Mapping[str, Any]) -> Record:
    """Return an object with inner objects and lists instead of names with dots.

    Args:
        given (`Mapping[str, Any]`): Object whose names may have dots.
    """
    root: Record = {}
    for path, value in given.items():
        *outer, last = path.split(".")
        place = root
        for name in outer:
            inner = place.get(name)
            place[name] = inner if isinstance(inner, dict) else {} if inner is None else {"": inner}
            place = place[name]
        if isinstance(place.get(last), dict):
            place[last][""] = value
        else:
            place[last] = dict(value) if isinstance(value, Mapping) else value
    return {name: _with_lists(value) for name, value in root.items()}


def _with_lists(value: Any) -> Any:
    """Return a value in which each object whose names are numbers is a list. The name `""` is then dropped."""
    if not isinstance(value, dict):
        return value
    found = {name: _with_lists(inner) for name, inner in value.items()}
    numbers = {int(name): inner for name, inner in found.items() if name.isdecimal()}
    return [numbers[n] for n in sorted(numbers)] if numbers and set(found) <= {"", *map(str, numbers)} else found


def _plain(attributes: Any) -> Mapping[str, Any]:
    """Convert OTLP's list of attributes to an object. Return an object unchanged."""
    if isinstance(attributes, list):
        return {each["key"]: _value(each.get("value") or {}) for each in attributes}
    return attributes or {}


def _value(given: Record) -> Any:
    if "arrayValue" in given:
        return [_value(each) for each in given["arrayValue"].get("values") or ()]
    if "kvlistValue" in given:
        return _plain(given["kvlistValue"].get("values") or [])
    if "intValue" in given:
        return int(given["intValue"])
    return next(iter(given.values()), None)
