"""Summarize a finished stage in a line."""

from topr_trl.pipeline.manifest import Json


def summary(stage: str, done: Json) -> str:
    """Return the line that a command prints of a stage; an import has a few."""
    if stage == "import":
        return _of_import(done)
    if stage == "score":
        counts = {**done["scored"]}
        kept = counts.pop("kept", 0)
        parts = [f"{n:,} {verdict}" for verdict, n in counts.items() if n]
        return ", ".join(parts + ([f"{kept:,} keep the reward that they came with"] if kept else [])) + "."
    if stage == "evaluate":
        return ", ".join(f"{name} {done[name]}" for name in ("greedy", "pass@1") if name in done)
    if stage == "curate":
        return f"Chosen: {done['curated']}."
    if stage == "log-mu" and (distance := done["sampler_distance"]):
        return (
            f"Sampler and trainer differ by {distance['token']:.2g} per token, {distance['response']:.2g} per "
            "completion."
        )
    return ""


_LEFT_OUT = {
    "broken": (
        "line is not valid JSON, or contains an unpaired surrogate, and is left out",
        "lines are not valid JSON, or contain unpaired surrogates, and are left out",
    ),
    "calls": (
        "record has a tool call whose arguments are not valid JSON, without token ids, and is left out",
        "records have tool calls whose arguments are not valid JSON, without token ids, and are left out",
    ),
    "unrewarded": ("record has no reward and is left out", "records have no reward and are left out"),
    "empty": ("record holds no completion to learn from", "records hold no completion to learn from"),
    "evaluated": ("record is of an evaluation and is left out", "records are of evaluations and are left out"),
    "repeated": ("file repeats the one before it and is left out", "files repeat those before them and are left out"),
}


def _of_import(done: Json) -> str:
    rows, rollouts, problems = done["rows"], done["rollouts"], done["problems"]
    has = [f"{name}{'' if n == rows else f' in {n:,}'}" for name, n in done["filled"].items() if n]
    said = [f"Format: {done['format']}. Rows have {', '.join(has)}."]
    if done["lacking"]:
        said.append(f"Not in these files: {', '.join(done['lacking'])}.")
    runs = f"{rollouts:,} runs" if rollouts < rows else f"{rows:,} row{'s' * (rows != 1)}"
    if 1 < rollouts == problems:
        said.append(f"{runs}, each of another problem: if some are of the same one, name it with --problem_field, as "
                    'topr trial, baseline="group_mean" and curation by problem compare those.')  # fmt: skip
    else:
        said.append(f"{runs} of {problems:,} problem{'s' * (problems != 1)}.")
    if not done["filled"].get("reward"):
        numbers = f" ({', '.join(found)} hold numbers)" if (found := done.get("numbers")) else ""
        said.append(f"There are no rewards: name their fields{numbers} with --reward_fields, or a second file "
                    "(--rewards), or score rows that have an answer.")  # fmt: skip
    if done["temperatures"][1:] or 0 in done["temperatures"]:
        found = ", ".join(f"{value:g}" for value in done["temperatures"])
        said.append(f"They were sampled at temperatures {found}, and the trainer takes one that is above 0: import "
                    "files of one, or set --temperature.")  # fmt: skip
    for kind, (one, more) in _LEFT_OUT.items():
        found = done["left_out"].get(kind, {"count": 0, "first": []})
        count, first = found["count"], found["first"]
        if count:
            said.append(f"{count} {one if count == 1 else more}: {', '.join(first)}{', ...' * (count > len(first))}.")
    if not done["filled"].get("sampler_logps"):
        said.append("There are no log-probabilities: log μ will be that of the model that training starts from, which "
                    "stands for the one that wrote the rows.")  # fmt: skip
    return "\n".join([*said, done["loses"]]).strip()
