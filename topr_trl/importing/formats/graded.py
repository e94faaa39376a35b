"""Read public datasets with several graded generations per problem, such as OpenR1-Math-220k."""

from topr_trl.importing.format import Format, LeftOut, NotOfFormat, Record, has
from topr_trl.importing.openai_messages import finish_reason
from topr_trl.importing.row_table import Row

_REQUIRED = ("problem", "generations", "correctness_math_verify")


def rows(record: Record) -> list[Row | LeftOut]:
    """Return a row for each graded generation, and `LeftOut.UNGRADED` for each generation without a grade.

    The reward is +1 if the generation is correct, and -1 if not.

    Raises:
        NotOfFormat: a grade is not true or false, or the numbers of generations, grades and finish reasons differ.
        Unusable: a finish reason is new.
    """
    generations = record["generations"] or []
    right = record["correctness_math_verify"] or [None] * len(generations)
    reasons = record.get("finish_reasons") or [None] * len(generations)
    if wrong := [each for each in right if each not in (True, False, None)]:
        raise NotOfFormat(f"its correctness_math_verify has {wrong[0]!r}, and must have true, false or null")
    if not len(generations) == len(right) == len(reasons):
        raise NotOfFormat(
            f"it has {len(generations)} generations, {len(right)} values in correctness_math_verify and {len(reasons)} "
            "finish_reasons: each list needs one value per generation"
        )
    return [
        LeftOut.UNGRADED
        if is_right is None
        else {
            "prompt": [{"role": "user", "content": record["problem"]}],
            "completion": [{"role": "assistant", "content": text}],
            "reward": 1.0 if is_right else -1.0, "finish_reason": finish_reason(reason),
            "problem_id": record.get("uuid"), "answer": record.get("answer"),
        }
        for text, is_right, reason in zip(generations, right, reasons, strict=True)
    ]  # fmt: skip


FORMAT = Format(
    source="the card of open-r1/OpenR1-Math-220k",
    test=has("problem", "generations", "correctness_math_verify"),
    rows=rows,
    columns=("reward", "finish_reason", "problem_id", "answer"),
    required=frozenset(_REQUIRED),
    optional=frozenset({
        "solution", "answer", "problem_type", "question_type", "source", "uuid", "is_reasoning_complete",
        "correctness_llama", "finish_reasons", "correctness_count", "messages",
    }),
    loses="Each problem of this dataset has at least one correct generation, so problems look easier than they are.",
)  # fmt: skip
