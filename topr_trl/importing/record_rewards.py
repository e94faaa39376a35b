"""Find the rewards of records, in their fields or in a file that lists rewards by id."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from topr_trl.baseline import LARGEST_REWARD
from topr_trl.data.rows import TURN_REWARDS
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.annotated_answers import RATINGS
from topr_trl.importing.field_names import normalized, words_of
from topr_trl.importing.format import Format, NotOfFormat, Record, Unrewarded, Unusable
from topr_trl.importing.reading_settings import ReadingArguments
from topr_trl.importing.record_fields import DifferentRatings, field_value
from topr_trl.importing.record_files import parsed, read_records
from topr_trl.importing.row_table import JSON_COLUMNS, Row

# Labels with the same meaning in every file, and their rewards: 1 for good and -1 for bad. `--label_values` replaces
# these labels.
_KNOWN_LABELS = {
    **dict.fromkeys(("true", "yes", "up", "thumbs up", "thumbs_up", "thumbsup", "good", "positive", "like"), 1.0),
    **dict.fromkeys(("correct", "👍"), 1.0),
    **dict.fromkeys(("false", "no", "down", "thumbs down", "thumbs_down", "thumbsdown", "bad", "negative"), -1.0),
    **dict.fromkeys(("dislike", "incorrect", "👎"), -1.0),
}  # fmt: skip
_SKIN_TONE = re.compile("[\U0001f3fb-\U0001f3ff\ufe0f]")  # skin tones of emojis, and the mark for a colored emoji


class RecordRewards:
    """Source of rewards for the records of one format: fields of a record, or a file of rewards.

    Args:
        args (`ReadingArguments`): Settings.
        format (`Format`): Format of the records.

    Raises:
        ValueError: the file of rewards is malformed.
    """

    def __init__(self, args: ReadingArguments, format: Format) -> None:
        self.args, self.format = args, format
        own = args.labels or {}
        self.labels = {**_KNOWN_LABELS, **format.labels, **own} if format.labels else args.labels
        self.by_id = read_by_id(args.rewards, ("id",), ("reward",))
        self.read_from = " + ".join(args.reward_fields or ())  # otherwise, field of earlier records

    @property
    def are_set(self) -> bool:
        """Whether `reward_fields` or `rewards` is set."""
        return bool(self.args.reward_fields) or self.by_id is not None

    def of(self, record: Record, rollouts: int) -> list[float] | None:
        """Return one reward per rollout. Return None if neither a setting nor `Format.rewards` defines rewards.

        The reward is the sum of the reward fields. A null field is left out if another field has a value.

        Args:
            record (`Record`): Record.
            rollouts (`int`): Number of rollouts that the record holds.

        Raises:
            NotOfFormat: the record has no id to look up in the file of rewards, several fields may be the reward, a
                reward is not a number, or the numbers of rewards and rollouts differ.
            Unusable: a reward is infinite, NaN or too large for float32, or two ratings with the same name differ.
            Unrewarded: the record has no field that may be the reward, it lacks a field of `reward_fields`, the file of
                rewards lacks its id, all reward fields are null, or a list of rewards has a null.
        """
        if (numbers := self._numbers_of(record)) is None:
            return None
        # If there are several reward functions, some can return None for a completion.
        known = {name: value for name, value in numbers.items() if value is not None}
        if not known:
            raise Unrewarded(f"its reward is null ({', '.join(numbers)})")
        by_rollout = {name: value if isinstance(value, list) else [value] for name, value in known.items()}
        for name, values in by_rollout.items():
            if None in values:
                raise Unrewarded(f"{name} is null for one of its completions")
            for value in values:
                _check_number(name, value)
            if len(values) != rollouts:
                raise NotOfFormat(
                    f"{name} holds {len(values)} reward(s) for {rollouts} completion(s): it must be a list with one "
                    "reward per completion"
                )
        return [float(sum(values)) for values in zip(*by_rollout.values(), strict=True)]

    def is_partial(self, record: Record) -> bool:
        """Return whether some of the `reward_fields` of a record are null, and some have a value.

        Args:
            record (`Record`): Record.
        """
        with suppress(Unrewarded):  # The reward of a run can be in another record.
            nulls = {value is None for value in (self._numbers_of(record) or {}).values()}
            return len(nulls) == 2
        return False

    def _numbers_of(self, record: Record) -> dict[str, Any] | None:
        """Return the reward fields of a record as numbers. See `of`."""
        if self.by_id is not None:
            values = {"reward": value_by_id(self.by_id, record, self.args.id_field, "--rewards", Unrewarded)}
        elif self.args.reward_fields:
            values = {name: self._field(record, name) for name in self.args.reward_fields}
        elif self.format.rewards is None:
            return None
        elif len(values := self.format.rewards(record)) != 1:
            which = (
                f"{', '.join(values)} may all be the reward"
                if values
                else f"it has {', '.join(record)}, and none of these fields is a known reward"
            )
            error = NotOfFormat if values else Unrewarded
            raise error(f"{which}: list the fields to add up in --reward_fields")
        elif None not in values.values():
            (name,) = values
            earlier = self.read_from = self.read_from or name
            if normalized(name) != normalized(earlier):
                raise NotOfFormat(
                    f"its reward is in {name}, and that of an earlier record in {earlier}, which may have another "
                    "scale. Set --reward_fields to one of them, and --skip_unrewarded to leave the others out"
                )
        for name, value in values.items():
            if isinstance(value, DifferentRatings):
                first, second = value.values
                raise Unusable(f"it has two ratings {value.name}: {first} and {second}. Keep one of them in the file")
            if isinstance(value, dict) and value:
                inner = ", ".join(f"{name}.{field}" for field in value)
                raise NotOfFormat(f"its {name} is an object. Set --reward_fields to one or more of {inner}")
        return {name: as_number(name, value, self.labels) for name, value in values.items()}

    def _field(self, record: Record, name: str) -> Any:
        """Return a field of `reward_fields`. Return None for a missing field if rewards can come later.

        Raises:
            NotOfFormat: the field is a rank or has bad votes, and `label_values` does not give the rewards.
        """
        # Ratings of annotation tools are no longer ranks, see `annotated_answers.ranked`.
        words = words_of(name)
        is_rank = words[-1:] in (["rank"], ["ranks"], ["ranking"]) and not {"reciprocal", "percentile"} & {*words}
        if is_rank and not self.labels and not name.startswith(f"{RATINGS}."):
            raise NotOfFormat(
                f"its {name} is a rank, and the lowest rank is often the best. Give each rank a reward: --label_values "
                "1=1 2=0 3=-1"
            )
        has_bad_votes = any(word == "down" or word.startswith(("downvote", "dislike")) for word in words)
        if has_bad_votes and "up" not in words and not self.labels:
            raise NotOfFormat(
                f"its {name} may be votes against the answer, and --reward_fields adds fields. Write the votes for it "
                f"minus those against it to one field. If {name} is true or false, set --label_values true=-1 false=1"
            )
        try:
            return field_value(record, name, Unrewarded)
        except Unrewarded:
            if self.format.skips_unrewarded:
                return None
            raise


class UnknownLabel(NotOfFormat):
    """Error for a reward that is neither a number nor a known label.

    Args:
        label (`str`): The label.
        message (`str`): Message of the error.
    """

    def __init__(self, label: str, message: str) -> None:
        super().__init__(message)
        self.label = label


def as_number(name: str, value: Any, labels: dict[str, float | None] | None) -> Any:
    """Convert the value of a reward field to a number, or to None if it means "no reward".

    If `labels` is given, each label becomes its number, whatever its case. Otherwise, words such as "up" become 1, and
    words such as "down" become -1. With or without `labels`, text such as "0.5" becomes a number, blank text becomes
    None, and a boolean that is not a label becomes 1 or -1. If a label is a number, every number must be a label.

    Args:
        name (`str`): Name of the field, for error messages.
        value (`Any`): Boolean, text, or a list of values to convert. Numbers that are not labels, and values of other
            types, are returned unchanged.
        labels (`dict`, *optional*): Number of each label. None means "no reward".

    Raises:
        UnknownLabel: the text is neither a label nor a number, or the number must be a label.
    """
    if isinstance(value, list):
        return [as_number(name, each, labels) for each in value]
    if value is None or value != value:  # NaN differs from itself.
        return value
    for spelling in (*spellings(value), str(value).strip().casefold()):
        if labels is not None and spelling in labels:
            return labels[spelling]
    if isinstance(value, bool):
        return 1.0 if value else -1.0
    has_numbers = any(map(_is_number, labels or ()))  # Then the labels are the whole scale.
    if not isinstance(value, str) and not (has_numbers and isinstance(value, int | float)):
        return float(value) if isinstance(value, Decimal) else value
    if not (text := str(value).strip()):
        return None
    if labels is None and (word := _SKIN_TONE.sub("", text).casefold()) in _KNOWN_LABELS:
        return _KNOWN_LABELS[word]
    if _is_number(text) and not has_numbers:
        return float(text)
    known = "" if labels is None else " (label_values replaces the built-in labels)"
    dash = f". A label that starts with - needs a space before it: ' {text[:40]}='" if text.startswith("-") else ""
    raise UnknownLabel(
        text,
        f"{name} is {text[:40]!r}, which is no known label{known}. Give each label a number, or nothing for no "
        f"reward: --label_values great=1 unsure= poor=-1{dash}",
    )


def _is_number(text: str) -> bool:
    """Return whether text is a number. Underscores, as in "1_0", are no part of a number."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def spellings(value: Any) -> Iterator[str]:
    """Yield the spellings of a value in settings such as `--label_values`: `0.0` and `0`, or `True`, `true` and `1`.

    Args:
        value (`Any`): Value of a field.
    """
    text = str(value).strip()
    yield text
    if isinstance(value, bool):
        yield text.lower()
    with suppress(TypeError, ValueError, OverflowError):
        yield f"{float(value):g}"


def check_rewards(rows: Sequence[Row]) -> None:
    """Check the rewards that a format set in its rows. Rewards of single turns have already been checked.

    Args:
        rows (`Sequence[Row]`): Rows of a record.

    Raises:
        Unrewarded: a row has no reward.
        NotOfFormat: a reward is not a number.
        Unusable: a reward is infinite, NaN or too large for float32.
    """
    for row in rows:
        if row.get(TURN_REWARDS) is not None:
            continue
        if row.get("reward") is None:
            raise Unrewarded("it has no reward")
        _check_number("its reward", row["reward"])


def _check_number(name: str, number: Any) -> None:
    if not isinstance(number, int | float) or not abs(number) <= LARGEST_REWARD:
        # A setting can skip a failed reward such as NaN. A value that is not a number is an error in the file.
        error = Unusable if isinstance(number, int | float) else NotOfFormat
        raise error(f"{name} is {number!r}, and a reward must be a finite number")


# Numeric fields that are never suggested as the reward.
_NEVER_REWARDS = (*SAMPLING, *JSON_COLUMNS, "seed", "n", "max_tokens")


def numbers_in(record: Any, inside: str = "") -> list[str]:
    """Return the names of the fields of a record that hold a number or a boolean, such as `reward` or `info.score`.

    Leave out fields that are never a reward, such as `temperature`.

    Args:
        record (`Any`): Record.
        inside (`str`, *optional*): Prefix of the names, for fields of an inner record.
    """
    if not isinstance(record, dict):
        return []
    return [
        name
        for field, value in record.items()
        for name in ([f"{inside}{field}"] if isinstance(value, int | float) else numbers_in(value, f"{inside}{field}."))
        if field not in _NEVER_REWARDS
    ]


def read_by_id(path: str | None, by: Sequence[str], names: Sequence[str]) -> dict[str, Any] | None:
    """Return a dictionary from the id of each record in a file to the value of a field. Return None if `path` is None.

    Ids become text, because a CSV file has the number 17 as text.

    Args:
        path (`str` or `None`): File of records.
        by (`Sequence[str]`): Fields that may have the id.
        names (`Sequence[str]`): Fields that may have the value.

    Raises:
        ValueError: the file cannot be read, a record is not an object or lacks a field, an id is neither text nor an
            integer, or two records have the same id.
    """
    if path is None:
        return None
    file, found = Path(path), dict[str, Any]()
    for place, raw in read_records(file):
        record = parsed(raw)
        fields = record if isinstance(record, dict) else {}
        key, value = (next((name for name in some if name in fields), None) for some in (by, names))
        if key is None or value is None or not isinstance(fields[key], str | int):
            raise ValueError(f"{place} must be JSON with the fields {by[0]} (text or an integer) and {names[0]}.")
        if (identifier := str(fields[key])) in found:
            raise ValueError(
                f"{place} has the same {key} as an earlier line: {fields[key]!r}. Remove one of the lines."
            )
        found[identifier] = fields[value]
    return found


def value_by_id(values: dict[str, Any], record: Record, by: str, option: str, error: type[NotOfFormat]) -> Any:
    """Return the value for the id of a record.

    Args:
        values (`dict`): Values by id, as `read_by_id` returns them.
        record (`Record`): Record.
        by (`str`): Field of the record with its id.
        option (`str`): Setting with the file of values, for error messages.
        error (`type[NotOfFormat]`): Error to raise if the file has no value for the id.

    Raises:
        NotOfFormat: the record has no id, or the file has no value for the id.
    """
    identifier = field_value(record, by, NotOfFormat)
    if not isinstance(identifier, str | int) or str(identifier) not in values:
        raise error(f"the file of {option} has no line for the {by} {identifier!r}")
    return values[str(identifier)]
