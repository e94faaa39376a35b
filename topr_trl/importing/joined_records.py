"""Join the lines of a file into records, such as sessions."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from topr_trl.importing.format import Placed, Record
from topr_trl.importing.record_files import parsed

LINES = "lines"  # field of a joined record with its lines


def joined_by(field: str, key: Callable[[str, Record], Any]) -> Callable[[Iterable[Placed]], Iterator[Placed]]:
    """Return a function for `Format.join` that joins the lines of a file that have the same key.

    The joined record has the place of its first line. A line that is broken, is not an object, or has the key None is
    yielded unchanged.

    Args:
        field (`str`): Field of the joined record with the key.
        key (`Callable`): Function that takes the place and the content of a line and returns its key. It returns `""`
            for a line to skip, and None for a line that is not a part of a record.
    """

    def join(records: Iterable[Placed]) -> Iterator[Placed]:
        found: dict[Any, tuple[str, list[Record]]] = {}
        for place, raw in records:
            record = parsed(raw)
            value = key(place, record) if isinstance(record, dict) else None
            try:
                hash(value)
            except TypeError:  # A part of the key is a list or an object, and should be text or a number.
                value = None
            if value is None:
                yield place, raw
            elif value != "":
                found.setdefault(value, (place, []))[1].append(record)
        for value, (place, lines) in found.items():
            yield place, {field: value, LINES: lines}

    return join
