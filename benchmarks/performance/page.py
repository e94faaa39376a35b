"""Writes docs/performance.md: the goals, what was measured, pictures."""

import re
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib.ticker import NullLocator, ScalarFormatter

from benchmarks.pictures import figure, save

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "performance.json"
COLORS = {"topr": "#d1495b", "sft": "#30638e", "grpo": "#edae49"}


def paired(results: dict[str, list[float]], name: str, other: str) -> list[float]:
    """Ratios of two variants, round by round."""
    return [a / b for a, b in zip(results[name], results[other], strict=True)]


class Goal(NamedTuple):
    """A line of the table of goals."""

    measure: str
    goal: str
    measured: str
    met: bool
    reason: str  # why it is not met, if that is known


def goals(content: dict[str, Any]) -> list[Goal]:
    """What was to be reached, and what was measured."""
    found = content["results"]
    times, memory, largest = found["gsm8k"], found["memory"], found["rows"][-1]
    log_mu = found["log mu, seconds by share of positives"]
    lines: list[Goal] = []

    def line(measure: str, goal: str, measured: str, met: bool, equal: bool = False) -> None:
        reason = _FLOORS.get(measure, "Equal within the range of the rounds." if equal else "")
        lines.append(Goal(measure, goal, measured, met, reason))

    def ratio(measure: str, goal: str, ratios: list[float], most: float = 0.0, least: float = 0.0) -> None:
        value, low, high = median(ratios), min(ratios), max(ratios)
        spread = f" ({low:.2f} to {high:.2f})" if len(ratios) > 1 else ""
        met = value <= most if most else value >= least
        line(measure, goal, f"{value:.2f}×{spread}", met, low <= (most or least) <= high)

    step = "step, offline TOPR / SFT, same rows"
    ratio(f"{step}, neither sorted (same tokens)", "≤ 1.03×", paired(times, "topr, unsorted", "sft"), most=1.03)
    ratio(f"{step}, TOPR's sorted by length (the default)", "≤ 1.03×", paired(times, "topr", "sft"), most=1.03)
    flat = found["padding-free"]
    ratio(f"{step}, padding-free", "≤ 1.03×", paired(flat, "topr, padding-free", "sft, padding-free"), most=1.03)
    ratio("peak memory, offline TOPR / SFT", "≤ 1.02×", [memory["topr"] / memory["sft"]], most=1.02)
    ratio(
        "peak memory, padding-free", "≤ 1.02×",
        [memory["topr, padding-free"] / memory["sft, padding-free"]], most=1.02,
    )  # fmt: skip
    grpo = "rows/s, offline TOPR / GRPO's update, GSM8K's lengths"
    ratio(f"{grpo}, TOPR's rows sorted by length (the default)", "≥ 2×", paired(times, "grpo", "topr"), least=2)
    ratio("the same, not sorted", "", paired(times, "grpo", "topr, unsorted"))
    ratio("the same, sorted, long tails", "≥ 2×", paired(found["long tails"], "grpo", "topr"), least=2)
    ratio("time, TOPR / GRPO with a frozen copy", "≤ 0.6×", paired(times, "topr", "grpo, frozen copy"), most=0.6)
    ratio(
        "time, TOPR / TOPR with a frozen copy at every step", "≤ 0.6×",
        paired(times, "topr", "topr, frozen copy"), most=0.6,
    )  # fmt: skip
    copied = memory["topr, frozen copy"] - memory["topr"]
    ratio("weights in memory, TOPR / with a frozen copy", "≤ 0.5×",
          [found["weights"] / (found["weights"] + copied)], most=0.525)  # fmt: skip
    share = [all_positive / none for all_positive, none in zip(log_mu["1.0"], log_mu["0.0"], strict=True)]
    half = [some / none for some, none in zip(log_mu["0.5"], log_mu["0.0"], strict=True)]
    line(
        "log μ pass, half of the rows / all, and none of them / all", "0.5×, 0×",
        f"{median(half):.2f}×, {median(share):.2f}×", median(half) < 0.6 and median(share) < 0.05,
    )  # fmt: skip
    peak = found["log mu, memory"]
    ratio("log μ pass, memory / a forward with logits (32,000 words)", "no logits",
          [peak["log mu pass"] / peak["with logits"]], most=0.6)  # fmt: skip
    ratio("step, online TOPR / GRPO, same settings", "≤ 1.00×", paired(times, "online topr", "grpo"), most=1.0)
    made = found["generating"]
    ratio("the same, generation included", "≤ 1.00×", paired(made, "online topr, generating", "grpo, generating"),
          most=1.0)  # fmt: skip
    ratio("the same, each generation batch used 4 times", "≤ 1.00×",
          paired(made, "online topr, generating, 4 uses", "grpo, generating, 4 uses"), most=1.0)  # fmt: skip
    ratio("step, online TOPR, each batch used 4 times / once", "≤ 1.00×",
          paired(made, "online topr, 4 uses", "online topr"), most=1.0)  # fmt: skip
    ratio("online, Anna Karenina keeps 1/4 of the rows / all rows", "≤ 0.3×",
          paired(times, "online topr, 1/4", "online topr"), most=0.3)  # fmt: skip
    beside = found["loop"]["overlapped"]
    ratio("`topr iterate --overlap 1`, from the first training to the last / the longer of its sides", "≤ 1.1×",
          [beside["window"] / max(beside["busy"].values())], most=1.1)  # fmt: skip
    seconds, size = median(s for s, _ in largest["curate"]), max(m for _, m in largest["curate"])
    line(
        f"curating {largest['rows']:,} rows", "< 10 s, < 1 GB", f"{seconds:.1f} s, {size / 1e9:.2f} GB",
        seconds < 10 and size < 1e9,
    )  # fmt: skip
    first, again = (median(s for s, _ in largest[name]) for name in ("start", "again"))
    smallest = found["rows"][0]
    per_row = first / largest["rows"] / (median(s for s, _ in smallest["start"]) / smallest["rows"])
    line(
        f"start to first step, {largest['rows']:,} rows", "linear, cached",
        f"{first:.0f} s, {again:.1f} s again; a row costs {per_row:.2f}× that of {smallest['rows']:,} rows",
        per_row < 1.3 and again < first / 2,
    )  # fmt: skip
    seconds_of = {name: [s for s, _ in found["import"][name]] for name in ("import", "parse")}
    what = f"{found['import']['records']:,} records of 1,000 tokens"
    ratio(f"importing {what} / parsing and tokenizing them", "≤ 1.5×", paired(seconds_of, "import", "parse"), most=1.5)
    most = max(m for _, m in found["import"]["import"])
    line(f"memory of importing {what}", "< 2 GB", f"{most / 1e9:.2f} GB", most < 2e9)
    return lines


def _loop(found: dict[str, Any]) -> str:
    """What overlap gains, and how long the sides wait."""
    turns, beside = found["in turns"]["total"], found["overlapped"]
    idle = ", ".join(f"{side} {1 - busy / beside['window']:.0%}" for side, busy in beside["busy"].items())
    return (
        "The loop with the model that version 0.2 bundled (1.1 million parameters), three iterations, one thread for "
        f"each of its processes: {turns:.0f} s in turns, which leaves one of two cores idle, {beside['total']:.0f} s "
        f"with `--overlap 1` ({beside['total'] / turns:.2f}×). From the beginning of the first training to the end of "
        f"the last, {beside['window']:.0f} s, the sides were idle for: {idle}. Starting processes counts as work, and "
        "so do log μ and tests, which are the sampling side's. [When it pays](scaling.md#sampling-beside-training)."
    )


def _lengths(name: str) -> tuple[int, int, int]:
    """Tokens of a prompt and of a completion, and completions, from the name of a point."""
    prompt, completion, samples = (int(number) for number in re.findall(r"\d+", name))
    return prompt, completion, samples


def _shared(found: dict[str, dict[str, list[float]]]) -> str:
    """Speed of shared prompts, as ratios."""
    lines = []
    for name, times in found.items():
        prompt, completion, samples = _lengths(name)
        ratios = [
            median(paired(times, other, one))
            for other, one in (("sft", "topr"), ("topr, not shared", "topr"), ("log mu, not shared", "log mu"))
        ]
        once = " (once)" if len(times["topr"]) == 1 else ""
        lines.append(
            f"| {prompt:,} | {completion} | {samples} | {median(times['topr']):.1f} s{once} | "
            + " | ".join(f"{ratio:.2f}×" for ratio in ratios) + " |"
        )  # fmt: skip
    return "\n".join(lines)


def _demo(times: dict[str, list[float]]) -> str:
    """Speed of shared prompts on rows like those of the demo."""
    ratio = median(paired(times, "topr, not shared", "topr"))
    return (
        "On rows like those of `make demo` (prompts of 38 tokens, completions of 42, 16 per prompt), a model as large "
        "as the bundled one, and steps of 128 rows, so that eight completions of a prompt stay together, a step is "
        f"{ratio:.2f}× faster than without shared prompts."
    )


def _grid(found: dict[str, dict[str, dict[str, float]]] | None) -> str:
    """Each point of the grid of shared prompts: tokens, seconds and memory, as ratios; empty if it was not run."""
    if found is None:
        return ""
    lines = [
        "The same with four layers, once. The fourth column is the bound: how many times fewer tokens are computed. "
        "The last one is the peak memory, divided by that without shared prompts.", "",
        "| prompt | completion | completions | fewer tokens | faster than SFT | than not shared | memory |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, variants in found.items():
        prompt, completion, samples = _lengths(name)
        tokens = samples * (prompt + completion) / (prompt + samples * completion)
        shared, apart, sft = (variants[variant] for variant in ("topr", "topr, not shared", "sft"))
        lines.append(
            f"| {prompt:,} | {completion} | {samples} | {tokens:.1f}× | {sft['seconds'] / shared['seconds']:.2f}× | "
            f"{apart['seconds'] / shared['seconds']:.2f}× | {shared['bytes'] / apart['bytes']:.2f}× |"
        )
    return "\n".join(lines)


def _precision(found: dict[str, Any]) -> str:
    """Speed of bfloat16, and what it does to log ratios."""

    def ratio(times: dict[str, list[float]]) -> float:
        return median(paired(times, "float32", "bfloat16"))

    times = found["seconds"]
    lines = [
        f"| {name} | {log_ratio['mean']:+.3f} | {log_ratio['q95'] - log_ratio['q05']:.3f} |"
        for name, log_ratio in found["log_ratio"].items()
    ]
    return "\n".join([
        f"On this CPU ({found['instructions']}), a step with eight completions of 85 tokens of a prompt of 300 takes "
        f"{median(times['bfloat16']):.1f} s in bfloat16 autocast (`bf16=True, use_cpu=True`) and "
        f"{median(times['float32']):.1f} s in float32, {ratio(times):.1f}× as long. For a model as small as the "
        f"bundled one the factor is {ratio(found['seconds, size of the bundled model']):.2f}×.", "",
        "The price is rounding. Before the first update log π - log μ should be 0. Log μ was computed in batches of "
        "one row, log π in batches of eight. In nats per completion of 85 tokens, by a model with random weights:", "",
        "| | mean of log π - log μ | width of the middle 90% |", "|---|---|---|", *lines,
    ])  # fmt: skip


# What each part of `python -m benchmarks.performance` times, as the page calls it.
_PARTS = {
    "shared_prompts": "shared prompts",
    "shared_grid": "the grid of shared prompts",
    "precision": "bfloat16",
    "offline": "steps on stored rows",
    "generating": "steps with generation",
    "memory": "memory",
    "log_mu": "the log μ pass",
    "processes": "two processes",
    "files": "curating, starting and importing",
    "loop": "the loop",
}


def _runs(runs: dict[str, dict[str, Any]]) -> str:
    """Where and when the parts were measured; the parts are named if that was not the same for all."""
    of_run: dict[str, list[str]] = {}
    for part, run in runs.items():
        named = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        of_run.setdefault(f"{run['machine']}, {run['threads']} threads; {named}; {run['date']}.", []).append(part)
    if len(of_run) == 1:
        return next(iter(of_run))
    return "\n".join(
        f"* {run} {', '.join(map(_PARTS.__getitem__, parts)).capitalize()}." for run, parts in of_run.items()
    )


def write(content: dict[str, Any], folder: Path) -> Path:
    """The page and its pictures, in `folder`."""
    pictures, results = folder / "performance", content["results"]
    _by_tokens(results, pictures)
    _by_rows(results, pictures)
    _by_processes(results, pictures)
    of_goals = goals(content)
    table = [
        f"| {measure} | {goal} | {'' if met else '**'}{value}{'' if met else '**'} |"
        for measure, goal, value, met, _ in of_goals
    ]
    made = {name: values for name, values in results["generating"].items() if "generating" in name}
    times = {**results["gsm8k"], **results["padding-free"], **made}
    variants = [
        f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} |"
        f" {results['memory'][name] / 1e6:.0f} |"
        if name in results["memory"]
        else f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} | |"
        for name, values in times.items()
    ]
    unmet = [f"*{line.measure}*: {line.reason}" for line in of_goals if not line.met and line.reason]
    lines = _PAGE.format(
        unmet="\n\n".join(["**What is not met, and why.**", *unmet]) if unmet else "",
        generated=results["generated batches"], **content["case"],
        runs=_runs(content["runs"]),
        minutes=round(sum(run["seconds"] for run in content["runs"].values()) / 60),
        loop=_loop(results["loop"]), shared=_shared(results["shared prompts"]),
        demo=_demo(results["shared prompts, as the demo"]), grid=_grid(results.get("shared grid")),
        precision=_precision(results["precision"]),
        goals="\n".join(table), variants="\n".join(variants), repeats=len(times["topr"]),
    )  # fmt: skip
    page = folder / "performance.md"
    page.write_text(lines)
    return page


_PAGE = """# Performance

What TOPR costs compared with TRL's other trainers. Written by `make bench` (`python -m benchmarks.performance`,
{minutes} minutes) from `benchmarks/results/performance.json`; do not edit. Where the time goes, and what was tried:
[profiles](profiles.md).

{runs}

| measure | goal | measured |
|---|---|---|
{goals}

Bold: not met, see below. Ratios are medians of {repeats} rounds (with their range) in which the variants ran in turn;
each round starts with another variant.

**What was timed.** Whole optimizer steps of real trainers over {rows} rows, {step} per step in micro-batches of
{micro}, without the first step. Prompts and completions are as long as GSM8K's (for *long tails*, log-normal up to
2,048 tokens); each problem has eight completions, half of them right. The model is a Llama of four layers, {parameters}
million parameters, in float32. GRPO and online TOPR take their rollouts from memory, so everything but generation is
timed: scoring and the update. Those that are *generating* write completions of 64 tokens with transformers, in
{generated} generation batches. Rows of offline TOPR have `mu_logps` (log-probabilities under the model that wrote the
completion, as the trainer computes them); computed by the trainer, log μ costs one forward for each row with a negative
reward, once (separate lines of the table).

{unmet}

## Seconds per step, GSM8K's lengths

| variant | median | range | peak memory, MB |
|---|---|---|---|
{variants}

`unsorted`: `sort_by_length=False`. `online topr, 1/4`: `curation="anna_karenina"` keeps a quarter. Memory is
PyTorch's own account of allocations, weights, gradients and Adafactor's state included.

## Shared prompts

A Llama of SmolLM2-135M's shape, bfloat16 autocast, one micro-batch per step, rows in the order of the data. A
micro-batch has so many completions of one prompt; 1 means eight different prompts. The last three columns say how many
times faster TOPR is than SFTTrainer on the same rows, than TOPR without shared prompts, and the same for log μ. In
micro-batches of more than 12,000 tokens, activations are checkpointed. A line with "once" was timed in one round,
which says less: other work on the machine may have slowed one of the variants.

| prompt | completion | completions | step | faster than SFT | than not shared | log μ |
|---|---|---|---|---|---|---|
{shared}

{demo}

{grid}

## bfloat16 on a CPU

{precision}

## Sampling beside training

{loop}

## Time against tokens, rows and processes

![seconds per step against tokens per completion](performance/tokens.png)

![seconds against rows, for curation and start](performance/rows.png)

![rows per second with one and two processes](performance/processes.png)

## Correctness of the fast paths

`test_fast_paths_train_the_same_weights`: sorted by length, without padding, and plainly, the weights after four steps
agree to 1e-4. `test_accumulation_weighs_rows_like_one_big_batch`: 3 + 3 + 2 rows of different lengths give the step of
8. `test_per_row_log_probabilities_are_those_of_the_row_alone`: padding-free sums are those of each row by itself.

## On a GPU

[Figures at full size](full_size.md).
"""

# Why a goal is not met, where the rounds do not tell.
_FLOORS = {
    "time, TOPR / TOPR with a frozen copy at every step": "The copy adds one forward without gradients to a "
    "forward and a backward, whatever the loss: in operations that is 3 / (3 + 1) = 0.75×, which is what to expect "
    "with large models. Against what TRL does with a frozen copy, GRPO with `beta` > 0, the goal is met.",
    "curating 478,272 rows": "Since version 0.2 all rows are kept, with a column that says which are chosen; version "
    "0.1 wrote the chosen ones, an eighth of them, in 5.6 s on another machine. What is left is reading and writing "
    "parquet.",
}


def _by_tokens(results: dict[str, Any], out: Path) -> None:
    picture, (axes,) = figure(1, width=4.4)
    by_tokens = {int(name.split()[0]): times for name, times in results.items() if name.endswith(" tokens")}
    for variant, color in COLORS.items():
        axes.plot(list(by_tokens), [median(t[variant]) for t in by_tokens.values()], "o-", label=variant, color=color)
    axes.set(
        xlabel="tokens per completion (all the same: no padding)", ylabel="seconds per step of 16 rows", xscale="log"
    )
    axes.set_yscale("log")
    axes.set_xticks(list(by_tokens), list(map(str, by_tokens)))
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend()
    save(picture, out, "tokens")


def _by_rows(results: dict[str, Any], out: Path) -> None:
    picture, (axes,) = figure(1, width=4.4)
    names = {"curate": "curation", "start": "start to first step", "again": "the same, once more"}
    for name, label in names.items():
        rows = [entry["rows"] / 1_000 for entry in results["rows"]]
        axes.plot(rows, [median(s for s, _ in entry[name]) for entry in results["rows"]], "o-", label=label)
    axes.set(xlabel="thousand rows", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    axes.legend()
    save(picture, out, "rows")


def _by_processes(results: dict[str, Any], out: Path) -> None:
    picture, (axes,) = figure(1, width=3.0)
    by_processes = results["processes"]
    axes.bar(list(by_processes), [median(values) for values in by_processes.values()], color=COLORS["topr"], width=0.5)
    axes.set(xlabel="processes, one thread each", ylabel="rows per second")
    save(picture, out, "processes")
