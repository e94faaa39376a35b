"""Measure the claims of the paper, cell by cell; a killed run continues where it stopped.

    python -m benchmarks                         # every claim, full profile: hours
    python -m benchmarks --profile quick         # minutes
    python -m benchmarks rivals positive_share   # some claims only
    python -m benchmarks --report                # only draw the pictures and judge what is finished

Results, pictures and the page of verdicts go to `reproduction/`, which starts empty: everything is measured again.
`--published` works on the results in `benchmarks/results` and on `docs/evidence.md` instead.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from benchmarks import cells, evidence, results_page
from benchmarks.claims import (
    against_positives,
    base,
    controls,
    difficulty,
    gradient_clipping,
    hard_task,
    iterations,
    learning_rates,
    log_mu_noise,
    long_responses,
    long_run,
    losses_compared,
    online_compared,
    optimizers_compared,
    overlapped,
    positive_share,
    predictors,
    protocols,
    rivals_compared,
    staleness,
    temperatures,
    theory,
    trials,
    verifier,
)
from benchmarks.setting import HERE, PROFILES, Profile, model_hash

# In this order: what comes later may need the learning rates and the base models.
CLAIMS = {
    "theory": theory,
    "base": base,
    "learning_rates": learning_rates,
    "rivals": rivals_compared,
    "positive_share": positive_share,
    "difficulty": difficulty,
    "gradient_clipping": gradient_clipping,
    "log_mu_noise": log_mu_noise,
    "long_responses": long_responses,
    "against_positives": against_positives,
    "iterations": iterations,
    "hard_task": hard_task,
    "staleness": staleness,
    "verifier": verifier,
    "online": online_compared,
    "overlapped": overlapped,
}

# Of the page "When do wrong answers pay?".
HYPOTHESES = {
    "protocols": protocols,
    "optimizers": optimizers_compared,
    "predictors": predictors,
    "losses": losses_compared,
    "long_run": long_run,
    "trials": trials,
}
# Claims on the page *Results*. `controls` needs the results of `temperatures`.
RESULTS = {"temperatures": temperatures, "controls": controls}
ALL = {**CLAIMS, **HYPOTHESES, **RESULTS}

NEEDED_BY_ALL = ("base", "learning_rates")
ALONE = {"theory", "base", "difficulty", "long_responses", "verifier", "online", "overlapped", *HYPOTHESES, *RESULTS}


def open_store(results: Path, profile: Profile) -> cells.Store:
    """The results in this folder that are of the profile's sizes and of today's base model."""
    return cells.Store(results, f"{profile.sizes}; model {model_hash('main')}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("claims", nargs="*", metavar="claim", help=f"of {', '.join(ALL)}; default: all")
    parser.add_argument("--profile", choices=PROFILES, default="full", help="sizes; default: full")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="cells at once, a thread each; default: cores"
    )
    parser.add_argument("--report", action="store_true", help="run nothing; draw and judge what is finished")
    parser.add_argument("--results", type=Path, default=Path("reproduction"), help="where to; default: reproduction")
    parser.add_argument("--published", action="store_true", help="go on with the published results and their page")
    args = parser.parse_args()
    if unknown := [name for name in args.claims if name not in ALL]:
        parser.error(f"there is no claim {unknown[0]}: choose from {', '.join(ALL)}")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    profile = PROFILES[args.profile]
    results = HERE / "results" if args.published else args.results / profile.name
    pages = HERE.parent / "docs" if args.published else results
    try:
        results.mkdir(parents=True, exist_ok=True)
        (results / ".writable").touch()
        (results / ".writable").unlink()
    except OSError as error:
        parser.error(f"results cannot be written to {results}: {error}")
    store = open_store(results, profile)
    chosen = [name for name in ALL if name in args.claims or not args.claims]
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    needed = [] if set(chosen) <= ALONE else [name for name in NEEDED_BY_ALL if name not in chosen]
    if needed and not args.report:
        print(f"{' and '.join(needed)} come first: the others need their learning rates")
    try:
        for name in [] if args.report else [*needed, *chosen]:
            claim = ALL[name]
            # What a claim needs to run may depend on what it has found: until nothing is left.
            try:
                while store.unfinished(planned := claim.cells(profile, store)):
                    cells.run(planned, partial(claim.work, profile=profile), store, args.workers, command, name)
            except cells.Unfinished as missing:
                print(f"{name} is left out: {missing}")
    finally:
        headlines = evidence.write(HYPOTHESES, store, profile, pages / "wrong_answers.md", hypotheses=True)
        evidence.write(CLAIMS, store, profile, pages / "evidence.md", more_headlines=headlines)
        results_page.write(store, profile, HERE.parent / "docs" / "results.md", pages / "results.md")
        print(f"\nTables, pictures and verdicts: {os.path.relpath(pages)}/results.md, evidence.md and wrong_answers.md")


if __name__ == "__main__":
    main()
