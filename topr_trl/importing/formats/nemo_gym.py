"""Read the rollouts of NeMo-Gym, which `gym eval run` writes to `output_jsonl_fpath`."""

from topr_trl.data.chat_templates import learned_turns
from topr_trl.data.sampler_logps import SAMPLING
from topr_trl.importing.calls import rows_of_call
from topr_trl.importing.dialects import openai_responses
from topr_trl.importing.format import Format, LeftOut, Record, has
from topr_trl.importing.row_table import Row
from topr_trl.importing.token_turns import as_rollout, join_turns, turn_of


def rows(record: Record) -> list[Row | LeftOut | None]:
    """Return one row of messages. If each turn has token ids, return one or more rows with token ids.

    Return `[LeftOut.FAILED]` for a failed rollout or response, and [] for an empty response.

    A turn extends the previous row if its prompt starts with all tokens of that row. Otherwise, the turn starts a new
    row of the same rollout. The last output item of a turn has the turn's token ids and log-probabilities
    (`prompt_token_ids`, `generation_token_ids`, `generation_log_probs`).

    Raises:
        NotOfFormat: the input of the request or the output of the response is missing.
        Unusable: the request has a tool that the provider runs itself, the file lacks a part of the prompt, an item
            cannot become a message (see `openai_responses.messages_of`), or a turn has lists of different lengths.
    """
    if record.get("_ng_failure_class"):
        return [LeftOut.FAILED]
    response = record["response"]
    problem = record.get("_ng_task_index")
    shared = {"problem_id": None if problem is None else str(problem)}
    made = rows_of_call(openai_responses.DIALECT, record["responses_create_params"], response)
    if not made or not isinstance(made[0], dict):
        return made
    row = {**made[0], **shared}
    turns = [turn_of(item["prompt_token_ids"], item["generation_token_ids"], item["generation_log_probs"])
             for item in response["output"] if item.get("generation_token_ids")]  # fmt: skip
    if len(turns) < len(learned_turns(row["completion"])):
        return [row]
    rollout = f"{problem}-{record.get('_ng_rollout_index')}-{response.get('id')}"
    return [{**row, **part} for part in as_rollout(join_turns(turns), rollout)]


FORMAT = Format(
    source="NeMo-Gym, with the Responses API (nemo_gym/rollout_collection.py at 00536e7, openai_utils.py at 009d2fe)",
    test=has("responses_create_params", "response"),
    rows=rows,
    rewards=lambda record: {"reward": record["reward"]},
    columns=(
        "prompt_ids", "completion_ids", "completion_mask", "sampler_logps", "problem_id", "rollout_id", "finish_reason",
        "tools", "chat_template_kwargs", *SAMPLING,
    ),
    required=frozenset({"responses_create_params", "response", "reward"}),
    loses="Rows have token ids if the model server returned them. Otherwise, text is tokenized again, which can give "
    "different tokens.",
)  # fmt: skip
