"""Check the quick profile of the benchmarks: one arm of each loop was run and stored, and clearly learns."""

from pathlib import Path

from benchmarks.__main__ import open_store
from benchmarks.experiments import ALL, long_run, online, planned, protocols, staleness
from benchmarks.report import NOT_YET
from benchmarks.setting import PROFILES

folder, profile = Path("reproduction/quick"), PROFILES["quick"]
store = open_store(folder, profile)
missing = [cell for name in ALL for cell in store.unfinished(planned(name, profile, store))]
assert not missing, f"not run: {missing}"

# All four arms start from the same base model. Two of them test it before training.
ARMS = {"offline": protocols, "rounds": long_run, "online": online, "stale": staleness}
results = {loop: store.results(module.QUICK)[0][1] for loop, module in ARMS.items()}
start = results["stale"]["curve"][0]["pass@1"]
for loop, result in results.items():
    end = (result["end"] if loop == "offline" else result["curve"][-1])["pass@1"]
    print(f"{loop:8} pass@1 {start:5.1%} -> {end:5.1%}")
    assert end > start + 0.03, f"the loop {loop} does not learn"

page, tables = (folder / name for name in ("results.md", "tables.md"))
assert "## What to use" in page.read_text()
assert NOT_YET in tables.read_text(), "the quick profile has no comparison"
