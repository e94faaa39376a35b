"""Measure the claims of the paper, cell by cell.

python -m benchmarks                         # every claim, full profile: hours, resumable
python -m benchmarks --profile quick         # minutes
python -m benchmarks rivals positive_share   # some claims only
python -m benchmarks --report                # only draw the pictures and write docs/evidence.md
"""

import argparse
import os
import sys
from functools import partial

from benchmarks import cells, evidence
from benchmarks.claims import (
    against_positives,
    difficulty,
    gradient_clipping,
    hard_task,
    iterations,
    learning_rates,
    log_mu_noise,
    positive_share,
    rivals_compared,
    staleness,
    theory,
)
from benchmarks.setting import HERE, PROFILES

# In this order: what comes later may need the learning rates.
CLAIMS = {
    "theory": theory,
    "learning_rates": learning_rates,
    "rivals": rivals_compared,
    "positive_share": positive_share,
    "difficulty": difficulty,
    "gradient_clipping": gradient_clipping,
    "log_mu_noise": log_mu_noise,
    "staleness": staleness,
    "against_positives": against_positives,
    "iterations": iterations,
    "hard_task": hard_task,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "claims", nargs="*", choices=[[], *CLAIMS], metavar="claim", help=f"of {', '.join(CLAIMS)}; default: all"
    )
    parser.add_argument("--profile", choices=PROFILES, default="full", help="sizes; default: full")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="cells at once, one thread each; default: cores"
    )
    parser.add_argument("--report", action="store_true", help="run nothing; draw and write from what is finished")
    args = parser.parse_args()
    profile = PROFILES[args.profile]
    store = cells.Store(HERE / "results" / profile.name)
    chosen = [name for name in CLAIMS if name in args.claims or not args.claims]
    if "learning_rates" not in chosen and set(chosen) - {"theory", "difficulty"}:
        chosen.insert(0, "learning_rates")
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    for number, name in enumerate([] if args.report else chosen, 1):
        todo = CLAIMS[name].cells(profile, store)
        work = partial(CLAIMS[name].work, profile=profile)
        cells.run(todo, work, store, args.workers, command, f"{number}/{len(chosen)} {name}")
    page = evidence.write(CLAIMS, store, profile)
    print(f"Pictures and verdicts: {os.path.relpath(page)}")


if __name__ == "__main__":
    main()
