"""Table 2: a small model learns to verify what a larger one wrote, and weighted self-consistency uses it."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cells import Cell, Store
from benchmarks.rivals import Direct, raw, tapered
from benchmarks.rows import Rows
from benchmarks.setting import BATCH_ROWS, Profile, folder, problems
from benchmarks.statistics import Measured, difference, over_seeds
from benchmarks.training import train
from benchmarks.verdicts import Verdict, judge, markdown_table, not_seen
from topr_trl import SamplingArguments, evaluate_rows, sample_completions, score_completions
from topr_trl.tasks import gsm8k
from topr_trl.tasks.verifier import STOP_STRINGS, solution_scores, verification_problems
from topr_trl.tasks.verifier import judge as judge_verification

PROBLEMS, SOLUTIONS, VERIFICATIONS = 120, 8, 4  # to train on: 3,840 rows
TEST_PROBLEMS, TEST_SOLUTIONS = 60, 32
LEARNING_RATES, VALIDATION_SEED = (1e-4, 3e-4), 1_000
MAX_NEW_TOKENS = 96
KS = (8, 32)
SOLVER, VERIFIER = folder("bundled-0.2"), folder("verifier-0.2")  # as bundled with version 0.2


def cells(profile: Profile, store: Store) -> list[Cell]:
    """Validation of the learning rates, and once that is known, the runs."""
    if profile.is_quick:
        return []
    shared = {"claim": "verifier", "models": models_hash()}
    validation = [{**shared, "learning_rate": rate, "seed": VALIDATION_SEED} for rate in LEARNING_RATES]
    if store.unfinished(validation):
        return validation
    rate = max(store.results(validation), key=lambda done: done[1]["topr"]["accuracy"])[0]["learning_rate"]
    return validation + [{**shared, "learning_rate": rate, "seed": seed} for seed in range(profile.seeds)]


@lru_cache
def models_hash() -> str:
    """Of both models' weights."""
    paths = (SOLVER, VERIFIER)
    return hashlib.sha256(b"".join((path / "model.safetensors").read_bytes() for path in paths)).hexdigest()[:12]


def work(cell: Cell, profile: Profile) -> dict[str, Any]:
    seed = cell["seed"]
    PartialState(cpu=True)
    disable_progress_bars()
    verifier, tokenizer = load(VERIFIER)
    verifications, _ = verify(verifier, tokenizer, solve(PROBLEMS, SOLUTIONS, 100 + seed, seed), seed)
    # Test problems are the same for all seeds, but those of the validation; what the solver writes is not.
    tested = solve(TEST_PROBLEMS, TEST_SOLUTIONS, 3 if seed == VALIDATION_SEED else 2, seed + 1)
    result = {"base": measure(verifier, tokenizer, tested, seed)}
    rows = Rows.of(verifications)
    objective = Direct(verifier, rows, tapered("topr"), raw)
    train(verifier, objective, -(-len(rows) // BATCH_ROWS), cell["learning_rate"], seed)
    verifier.eval()
    return {**result, "topr": measure(verifier, tokenizer, tested, seed), "rows": len(rows),
            "positives": float((rows.rewards > 0).mean())}  # fmt: skip


def verify(verifier: Any, tokenizer: Any, solutions: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Scored verifications of solutions, and the solutions with the column `score`."""
    problems = verification_problems(solutions)
    written = sample_completions(verifier, tokenizer, problems, sampling(), STOP_STRINGS, seed)
    scored = score_completions(written, judge_verification)
    return scored, solutions.add_column("score", solution_scores(scored, len(solutions)))


def load(path: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def sampling(count: int = VERIFICATIONS) -> SamplingArguments:
    return SamplingArguments(num_generations=count, max_new_tokens=MAX_NEW_TOKENS)


def solve(count: int, candidates: int, problem_seed: int, seed: int) -> Dataset:
    solver, tokenizer = load(SOLVER)
    questions = problems("main", count, problem_seed)
    written = sample_completions(solver, tokenizer, questions, sampling(candidates), gsm8k.STOP_STRINGS, seed)
    return score_completions(written, gsm8k.judge)


def measure(verifier: Any, tokenizer: Any, solutions: Dataset, seed: int) -> dict[str, Any]:
    verifications, scored = verify(verifier, tokenizer, solutions, 10_000 + seed)
    own = evaluate_rows(verifications)
    of_truth = {
        truth: [reward > 0 for reward, answer in zip(verifications["reward"], verifications["answer"], strict=True)
                if answer == truth]
        for truth in ("yes", "no")
    }  # fmt: skip
    chosen = evaluate_rows(scored, maj_ks=KS, weighted_sc_ks=KS, best_ks=KS)
    return {
        "accuracy": own.pass_at[1].value, "error": own.pass_at[1].standard_error, "invalid": own.shares["invalid"],
        **{f"accuracy on {truth}": sum(kind) / len(kind) for truth, kind in of_truth.items()},
        "pass@1": chosen.pass_at[1].value,
        **{f"{name}@{k}": estimates[k].value for k in KS
           for name, estimates in (("maj", chosen.maj_at), ("SC", chosen.weighted_sc_at), ("best", chosen.best_at))},
    }  # fmt: skip


# Report.


def report(store: Store, profile: Profile, out: Path) -> list[Verdict]:
    done = [(cell, result) for cell, result in store.results(cells(profile, store)) if cell["seed"] != VALIDATION_SEED]

    def measured(who: str, what: str) -> Measured:
        return {cell["seed"]: (result[who][what], result[who].get("error" if what == "accuracy" else "", float("nan")))
                for cell, result in done}  # fmt: skip

    def shown(who: str, what: str) -> str:
        return over_seeds(measured(who, what)).percent()

    names = {"base": "base verifier", "topr": "verifier trained with TOPR"}
    table = [["none", "", "", "", *(f"{shown('base', f'maj@{k}')} (maj@{k})" for k in KS), "", ""]]
    for who, name in names.items():
        table.append([
            name, shown(who, "accuracy"), f"{shown(who, 'accuracy on yes')} / {shown(who, 'accuracy on no')}",
            shown(who, "invalid"), *(shown(who, f"SC@{k}") for k in KS), *(shown(who, f"best@{k}") for k in KS),
        ])  # fmt: skip
    gain = {
        what: difference(measured("topr", what), measured("base", what))
        for what in ("accuracy", "invalid", *(f"SC@{k}" for k in KS))
    }
    over_majority = {k: difference(measured("topr", f"SC@{k}"), measured("base", f"maj@{k}")) for k in KS}
    rows, positives = (sum(result[what] for _, result in done) / len(done) for what in ("rows", "positives"))
    solver = over_seeds(measured("base", "pass@1")).percent()
    last = KS[-1]
    parts = {
        "higher accuracy": gain["accuracy"].low > 0,
        "fewer invalid verdicts": gain["invalid"].high < 0,
        f"weighted SC@{last} above the base verifier's": gain[f"SC@{last}"].low > 0,
        f"weighted SC@{last} above the majority": over_majority[last].low > 0,
    }
    why = (
        "before training the verifier is right about "
        f"{shown('base', 'accuracy on yes')}% of the right solutions and {shown('base', 'accuracy on no')}% of the "
        "wrong ones (a missing verdict is wrong): a yes says little. Seven solutions of ten are wrong, so saying "
        "no more often earns the reward more easily than checking better, and scores near 0 throw votes away. A base "
        "verifier that can check, as an 8B model can, was not made: another one of this size, taught with 10% slips "
        "per equation instead of 25% (one seed, not kept), was right about 45 and 37%, and TOPR took its accuracy "
        "from 40 to 64% and its weighted SC@32 from 83 to 75%, at a majority of 83%."
    )
    return [
        Verdict(
            "Table 2: TOPR makes a verifier, and weighted self-consistency with it beats the majority",
            "verifier accuracy 32.6 -> 70.9%, invalid 34.2 -> 0.90%; weighted SC over 32: none 55.5, base 56.7, TOPR "
            "61.5%",
            f"solver of 1.1 million parameters (pass@1 {solver}%), verifier of 0.3 million, {rows:,.0f} verifications "
            f"to learn from ({positives:.0%} right), one epoch at the "
            f"better of {len(LEARNING_RATES)} learning rates, {len(done)} seeds; TOPR minus base: accuracy "
            f"{gain['accuracy'].percent(signed=True)}, invalid {gain['invalid'].percent(signed=True)}, weighted "
            f"SC@{last} {gain[f'SC@{last}'].percent(signed=True)} points; weighted SC minus majority "
            + ", ".join(f"{interval.percent(signed=True)} at {k}" for k, interval in over_majority.items())
            + not_seen(parts),
            judge(*parts.values()),
            "" if all(parts.values()) else why,
            details=markdown_table(
                ["verifier", "accuracy", "on right / wrong solutions", "invalid",
                 *(f"weighted SC@{k}" for k in KS), *(f"best of {k}" for k in KS)],
                table,
            ),
        )
    ]  # fmt: skip
