"""Read recordings of `topr record`: rollouts of one or more calls, with their rewards.

If the prompt of a call starts with the prompt and the answer of an earlier call, the call extends the row of the
earlier call. Everything between the two answers is context. Both calls must have the same model, tools, chat template
arguments and sampling settings. Without token ids, only chat calls can extend a row, and only if the last answer of the
row is not cut.

Any other call starts a new row of the same rollout. For instance, a row starts if the call belongs to a new
conversation, or if the application or the chat template changed earlier turns.

If answers have rewards of their own, each turn of a row gets the reward of its answer (`turn_rewards`). An answer whose
tokens directly follow the tokens of the earlier answer then starts a new row, because a mask cannot separate the turns.
"""

from topr_trl.data.rows import ROLLOUT
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.calls import rows_of_call
from topr_trl.importing.completions import turns_of
from topr_trl.importing.dialects import anthropic, ollama, openai, openai_completions, openai_responses
from topr_trl.importing.format import GRADED, Format, LeftOut, Record, has
from topr_trl.importing.rated_turns import NUMBER, reads_row
from topr_trl.importing.record_fields import inner_value, rewards_in
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout, extended
from topr_trl.recording.protocols import choice_of
from topr_trl.recording.protocols.completions import CHAT, TEXT, prompt_of
from topr_trl.recording.protocols.messages import without_request_hashes
from topr_trl.recording.store import State

_DIALECTS = {
    CHAT: openai.DIALECT, TEXT: openai_completions.DIALECT, "responses": openai_responses.DIALECT,
    "messages": anthropic.DIALECT, "api/chat": ollama.DIALECT,
}  # fmt: skip
_MODEL_COLUMNS = "model", "served_model", "model_revision"
_SAME = ("tools", "chat_template_kwargs", *_MODEL_COLUMNS, *SAMPLING)  # equal in all calls of a row
_TOKEN_COLUMNS = ("prompt_ids", "completion_ids", "sampler_logps")


def rows(record: Record) -> list[Row | LeftOut]:
    """Return the rows of a rollout.

    Return `[LeftOut.UNGRADED]` for a rollout without a reward, and `[LeftOut.FAILED]` for a rollout whose answers are
    all missing, failed or empty.

    Args:
        record (`Record`): Rollout, as `read_rollouts` returns it.

    Raises:
        NotOfFormat: a call does not match the dialect of its endpoint.
        Unusable: a call matches the dialect of its endpoint, but the dialect cannot use the call.
    """
    by_answer = any(_is_graded(call) for call in record["calls"])
    if not by_answer and not _is_graded(record):
        return [LeftOut.UNGRADED]
    made: list[Row] = []
    answers = [_row_of_call(call, by_answer) for call in record["calls"]]
    left_out = [row for row in answers if isinstance(row, LeftOut)]
    found = [row for row in answers if isinstance(row, dict)]
    by_tokens = all(row["prompt_ids"] and row["completion_ids"] for row in found)
    for row in found:
        # A row with token ids and a row without them cannot be joined.
        later = row if by_tokens else {**row, **dict.fromkeys(_TOKEN_COLUMNS)}
        for n, earlier in reversed(list(enumerate(made))):  # A rollout can alternate between conversations.
            if (joined := _joined(earlier, later)) is not None:
                made[n] = joined
                break
        else:
            made.append(later)
    return [*left_out, *as_rollout(made, record["rollout_id"])] or [LeftOut.FAILED]


def _is_graded(record: Record) -> bool:
    return any(reward is not None for reward in record["rewards"].values())


def _row_of_call(call: Record, by_answer: bool) -> Row | LeftOut | None:
    """Return the row of a call, with the rewards of its answer if `by_answer` is true.

    Return None if the answer is missing, failed or empty, and `LeftOut.CALLS` if it ends with a tool call that was cut
    before its arguments.
    """
    choice = choice_of(call)
    if choice is None:
        return None
    asked, response, endpoint = call["request"], call["response"], call["endpoint"]
    tokens = inner_value(response, "usage", "completion_tokens") if len(response.get("choices") or ()) == 1 else None
    if endpoint == CHAT and tokens and choice.get("token_ids") and tokens != len(choice["token_ids"]):
        # Streams of older vLLM lack the ids of some tokens around tool calls.
        choice = {name: value for name, value in choice.items() if name not in ("token_ids", "logprobs")}
    if endpoint in (CHAT, TEXT):
        response = {**response, "choices": [choice]}
    if endpoint == TEXT:
        asked = {**asked, "prompt": prompt_of(asked, call["choice"]), "n": 1}
    row = next(iter(rows_of_call(_DIALECTS[endpoint], asked, response)), None)
    if row is None or isinstance(row, LeftOut):
        return None
    if call["state"] == State.CUT:  # An incomplete answer has no stop token.
        row["finish_reason"] = row.get("finish_reason") or "length"
    if row.get("finish_reason") == "length" and not row.get("completion_ids") and _ends_before_arguments(row):
        return LeftOut.CALLS
    if isinstance(row["prompt"], list):
        row["prompt"] = without_request_hashes(row["prompt"])
    model = {"model": asked.get("model"), "served_model": call["served_model"],
             "model_revision": call["model_revision"]}  # fmt: skip
    graded = {GRADED: [{"rewards": call["rewards"], NUMBER: call["number"]}] * turns_of(row)} if by_answer else {}
    return {**dict.fromkeys(_TOKEN_COLUMNS), **row, **model, **graded}


def _ends_before_arguments(row: Row) -> bool:
    calls = (row["completion"][-1]["tool_calls"] if isinstance(row["completion"], list) else None) or []
    return any(call["function"]["arguments"] in ("", "{}") for call in calls[-1:])


def _joined(row: Row, later: Row) -> Row | None:
    """Join a row and the row of a later call. Return None if the later call does not continue the row.

    If turns have rewards of their own, also return None if no token separates the later answer from the row.
    """
    if any(row.get(name) != later.get(name) for name in _SAME) or not isinstance(later["prompt"], type(row["prompt"])):
        return None
    if row.get("completion_ids"):
        has_context = len(later["prompt_ids"]) > len(row["prompt_ids"]) + len(row["completion_ids"])
        if GRADED in row and not has_context:  # Nothing in the mask would separate the two turns.
            return None
        tokens = extended(row, later)
        return None if tokens is None else {**later, **tokens, **_joined_text(row, later)}
    is_chat = isinstance(row["prompt"], list)
    return {**later, **_joined_text(row, later)} if is_chat and reads_row(later["prompt"], row) else None


def _joined_text(row: Row, later: Row) -> Row:
    """Return the prompt of a row, and a completion with everything after this prompt, including the later answer.

    Also return the rewards of all turns, if the turns have rewards of their own.
    """
    graded = {GRADED: [*row[GRADED], *later[GRADED]]} if GRADED in row else {}
    if not isinstance(row["prompt"], list):
        # The later prompt has the earlier completion with its special tokens, which the text of a completion lacks.
        # Prompts that were sent as token ids have no text, so the completions alone are joined.
        since = later["prompt"].removeprefix(row["prompt"]) if row["prompt"] else row["completion"]
        return {"prompt": row["prompt"], "completion": since + later["completion"], **graded}
    read = len(row["prompt"]) + len(row["completion"])
    # An assistant turn between the answers comes from the application, or from a call in a different row, such as a
    # call of a different model. Weight 0 makes the turn context.
    between = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in later["prompt"][read:]]
    return {"prompt": row["prompt"], "completion": [*row["completion"], *between, *later["completion"]], **graded}


FORMAT = Format(
    source="recordings of topr record",
    test=has("rollout_id", "calls", "rewards", "comments"),
    rows=rows,
    rewards=rewards_in("rewards"),  # A missing reward is None.
    columns=(
        "prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "problem_id", ROLLOUT, "finish_reason",
        "tools", "chat_template_kwargs", *SAMPLING, *_MODEL_COLUMNS,
    ),
    required=frozenset({"rollout_id", "calls", "rewards"}),
    names_rollouts=True,
    rates_turns=True,
    skips_unrewarded=True,
    loses="To add later rollouts, import again with a different --output_dir. A request without a "
    "temperature used the default of the server, which is assumed to be 1.",
)  # fmt: skip
