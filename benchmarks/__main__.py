"""Run experiments on small models, cell by cell. A cell is one run. The same command continues a killed experiment.

    python -m benchmarks                       # all experiments, full profile: days on two cores
    python -m benchmarks --profile quick       # one arm of each loop: minutes
    python -m benchmarks rivals protocols      # some experiments only
    python -m benchmarks --report              # run nothing, write tables of finished cells

Results and tables are written to `reproduction/`. `--published` continues the results in
`benchmarks/results`, and fills in README.md, `docs/results.md`, `docs/which_method.md` and
`benchmarks/appendix/tables.md`.
"""

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks import cells, pictures, real_page, report, results_page
from benchmarks.experiments import ALL, planned, work
from benchmarks.setting import HERE, PROFILES, Profile, model_hash

TABLES = HERE / "appendix" / "tables.md"


def open_store(results: Path, profile: Profile) -> cells.Store:
    """Return the results in a folder for the sizes of a profile and the current weights of `main`."""
    return cells.Store(results, f"{profile.sizes}; model {model_hash('main')}")


def published() -> cells.Store:
    """Return the published results."""
    return open_store(HERE / "results", PROFILES["full"])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=f"one of {', '.join(ALL)}; default: all")
    parser.add_argument("--profile", choices=PROFILES, default="full", help="sizes; default: full")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="worker processes, with one thread each")
    parser.add_argument("--report", action="store_true", help="run nothing, write tables of finished cells")
    parser.add_argument("--results", type=Path, default=Path("reproduction"), help="folder; default: reproduction")
    parser.add_argument(
        "--published", action="store_true", help="continue the published results, and fill in the published pages"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.experiments if name not in ALL]:
        parser.error(f"there is no experiment {unknown[0]}: choose from {', '.join(ALL)}")
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, not {args.workers}")
    profile = PROFILES[args.profile]
    results = HERE / "results" if args.published else args.results / profile.name
    try:
        results.mkdir(parents=True, exist_ok=True)
        (results / ".writable").touch()
        (results / ".writable").unlink()
    except OSError as error:
        parser.error(f"results cannot be written to {results}: {error}")
    store = open_store(results, profile)
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    chosen = [] if args.report else [name for name in ALL if name in args.experiments or not args.experiments]
    for names in [chosen] if profile.is_quick else [[name] for name in chosen]:
        try:
            cells.run(
                lambda names=names: [cell for name in names for cell in planned(name, profile, store)],
                partial(work, profile=profile), store, args.workers, command, " ".join(names),
            )  # fmt: skip
        except cells.Unfinished as missing:
            print(f"{names[0]} is left out: {missing}")
    tables = TABLES if args.published else results / "tables.md"
    tables.write_text(report.appendix(store), encoding="utf-8")
    page = results_page.write(store, results_page.PAGE if args.published else results / "results.md")
    if args.published:
        for other in results_page.PAGES[1:]:
            results_page.write(store, other, template=other)
        real_page.write(real_page.PAGE)
        for name, draw in pictures.PICTURES.items():
            with suppress(cells.Unfinished):
                draw(store, HERE.parent / "docs" / "results" / name)
    print(f"Written: {os.path.relpath(tables)}, {os.path.relpath(page)}")


if __name__ == "__main__":
    main()
