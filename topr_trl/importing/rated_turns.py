"""Join the rated answers of a conversation into a row with a reward for each turn, and compute returns."""

from collections.abc import Mapping, Sequence
from typing import Any

from topr_trl.data.chat_templates import learned_turns
from topr_trl.data.rows import ROLLOUT, TURN_DISCOUNT, TURN_REWARDS
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.completions import cut_turns, turns_of
from topr_trl.importing.format import GRADED, LeftOut, NotOfFormat, Unusable
from topr_trl.importing.row_table import Row

RATED = "rated"  # key of a row whose reward is for its completion, which is one answer of a conversation
NUMBER = "number"  # key of an entry in `GRADED` with the number of its answer. Parts of a rollout can alternate.
_SAME = ("tools", "chat_template_kwargs", "model", *SAMPLING)  # columns whose values are equal in all answers of a row


def as_rated(rows: Sequence[Row | LeftOut | None]) -> list[Row | LeftOut | None]:
    """Return rows with the mark `RATED`: the reward of each row is for one answer of a conversation."""
    return [{**row, RATED: True} if isinstance(row, Mapping) else row for row in rows]


def check_turns(rows: Sequence[Row]) -> None:
    """Check that rows have rewards of turns, which a discount needs.

    Raises:
        NotOfFormat: the reward of a row is for the whole row.
        Unusable: the row of a rated answer has token ids or a text prompt, so the earlier turns are not known.
    """
    for row in rows:
        if row.get(TURN_REWARDS) is None and not row.get(RATED):
            raise NotOfFormat(
                "its reward is for the whole completion, and --turn_discount needs rewards of single turns. Remove "
                "--turn_discount, or the setting that names the reward"
            )
        if row.get(RATED) and (row.get("completion_ids") or not isinstance(row["prompt"], list)):
            raise Unusable("its answer has token ids or text, so --turn_discount cannot find the earlier turns")


def join_answers(rows: Sequence[Row], discount: float | None) -> list[Row]:
    """Return the rows of a conversation after joining its rated answers.

    An answer joins the row of an earlier answer if its prompt starts with all messages of that row, see `reads_row`.
    The two answers must have no token ids, and the same model, tools, chat template arguments and sampling settings.
    Without a discount, an answer that joins no other answer keeps its row with `reward`.

    An answer can have several turns, such as tool calls. Without a discount, all these turns get the reward of the
    answer. With a discount, only the last turn gets the reward.

    Args:
        rows (`Sequence[Row]`): Rows of messages with a reward, each for one answer of the same conversation.
        discount (`float`, *optional*): Discount of returns.
    """
    chains: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row["prompt"])):
        earlier = next((chain for chain in chains if _continues(chain[-1], row)), None)
        if earlier is None:
            chains.append([row])
        else:
            earlier.append(row)
    found: list[Row] = []
    read: list[list[Row]] = []  # messages of earlier rows, which another branch of the conversation can share
    for chain in chains:
        if len(chain) == 1 and not discount:
            found.append(chain[0])
            continue
        found += with_turn_rewards([_row_of(chain, read, bool(discount))], discount)
        read.append([*chain[-1]["prompt"], *chain[-1]["completion"]])
    return found


def _continues(row: Row, later: Row) -> bool:
    """Return whether a later answer continues a row of messages, with equal values in the columns `_SAME`."""
    if any(row.get(name) != later.get(name) for name in _SAME):
        return False
    if any(each.get("completion_ids") or not isinstance(each["prompt"], list) for each in (row, later)):
        return False
    return reads_row(later["prompt"], row)


def reads_row(prompt: list[Row], row: Row) -> bool:
    """Return whether a prompt starts with the messages of a row, so that a later answer can continue the row.

    A later answer cannot continue a cut answer, because the row would get a stop token after the cut.

    Args:
        prompt (`list[Row]`): Messages that the model read before the later answer.
        row (`Row`): Row of messages, without token ids.
    """
    read = [*row["prompt"], *row["completion"]]
    return row.get("finish_reason") != "length" and _shared(read, prompt) == len(read)


def _shared(messages: list[Row], others: list[Row]) -> int:
    """Return the number of messages with which both conversations start. An empty field counts as missing."""
    same = 0
    for message, other in zip(messages, others, strict=False):
        if any((message.get(name) or None) != (other.get(name) or None) for name in {*message, *other}):
            break
        same += 1
    return same


def _row_of(chain: Sequence[Row], read: Sequence[list[Row]], at_end: bool) -> Row:
    """Return one row for answers that continue each other.

    The completion starts at the first turn that no earlier row has.
    """
    last = chain[-1]
    messages = [*last["prompt"], *last["completion"]]
    ratings: dict[int, Any] = {}
    for row in chain:
        own = [len(row["prompt"]) + n for n in learned_turns(row["completion"])]
        ratings |= dict.fromkeys(own[-1:] if at_end else own, row["reward"])
    # A turn that these answers rate stays in their row, even if an earlier row has the same turn.
    shared = min(max((_shared(each, messages) for each in read), default=0), len(last["prompt"]), *ratings)
    turns = [n for n in learned_turns(messages) if n >= max(shared, 1)]  # A greeting at the start is context.
    return {
        **last, "prompt": messages[: turns[0]], "completion": messages[turns[0] :], "reward": None,
        "problem_id": chain[0]["problem_id"], TURN_REWARDS: [ratings.get(n) for n in turns],
    }  # fmt: skip


def with_turn_rewards(parts: Sequence[Row], discount: float | None) -> list[Row]:
    """Return the rows of a rollout, each cut to the turns from its first to its last reward.

    Rows without a reward are left out. With a discount, rewards become returns in the order of the answers, and the
    last turn of an answer has its reward. Turns before a reward also have a return, so the rows then start at the first
    turn. If only one row is left, it loses its `rollout_id`. If this row has only one turn and there is no discount, it
    gets `reward` instead of `turn_rewards`.

    Args:
        parts (`Sequence[Row]`): Rows of one rollout, in order, with `turn_rewards`: a number or None for each turn.
        discount (`float`, *optional*): Discount of returns.

    Raises:
        Unusable: a row does not have one reward or None for each of its turns.
    """
    for row in parts:
        if len(row[TURN_REWARDS]) != turns_of(row):
            raise Unusable(f"it has rewards or nulls for {len(row[TURN_REWARDS])} turns, and {turns_of(row)} turns")
    lists = [row[TURN_REWARDS] for row in parts]
    if discount:
        entries = [entry for row in parts for entry in row.get(GRADED) or [{}] * turns_of(row)]
        rewards = [each for turns in lists for each in turns]
        order = sorted(range(len(entries)), key=lambda n: entries[n].get(NUMBER, 0))
        numbers = [entries[n].get(NUMBER) for n in order]
        ends = [number is None or number != later for number, later in zip(numbers, [*numbers[1:], None], strict=True)]
        found = returns([rewards[n] if is_end else None for n, is_end in zip(order, ends, strict=True)], discount)
        in_rows = iter([value for _, value in sorted(zip(order, found, strict=True))])
        lists = [[next(in_rows) for _ in turns] for turns in lists]
    rated = [[n for n, each in enumerate(turns) if each is not None] for turns in lists]
    kept = [
        {**cut_turns(row, own[0], own[-1]), TURN_REWARDS: turns[own[0] : own[-1] + 1], TURN_DISCOUNT: discount}
        for row, turns, own in zip(parts, lists, rated, strict=True)
        if own
    ]
    if len(kept) > 1:
        return kept
    for row in kept:
        row.pop(ROLLOUT, None)
        if len(row[TURN_REWARDS]) == 1 and not discount:
            row["reward"] = row.pop(TURN_REWARDS)[0]
    return kept


def returns(rewards: Sequence[float | None], discount: float) -> list[float | None]:
    """Return the return of each turn: the discounted sum of the rewards from this turn on.

    Turns after the last reward get None.

    Args:
        rewards (`Sequence[float | None]`): Reward of each turn. None counts as 0.
        discount (`float`): Factor for the return of the next turn.
    """
    found: list[float | None] = []
    later: float | None = None
    for reward in reversed(rewards):
        if reward is not None or later is not None:
            later = (reward or 0.0) + discount * (later or 0.0)
        found.append(later)
    return found[::-1]
