"""What the quick profile of the benchmarks has to show: only what is far outside noise."""

from pathlib import Path

from benchmarks.cells import Store
from benchmarks.claims import rivals_compared, theory
from benchmarks.setting import PROFILES

profile = PROFILES["quick"]
store = Store(Path("benchmarks/results/quick"))
ends = {cell["rival"]: result["curve"][-1] for cell, result in store.results(rivals_compared.cells(profile, store))}
base, topr, reinforce = ends["base"], ends["topr"], ends["reinforce"]
for name, end in ends.items():
    print(f"{name:16} pass@1 {end['pass@1']:.1%}, invalid {end['invalid']:.1%}")

assert topr["pass@1"] > base["pass@1"] + 0.05, "TOPR does not improve the base model"
assert reinforce["pass@1"] < base["pass@1"] / 4, "naive REINFORCE does not collapse"
assert topr["invalid"] < base["invalid"] / 4, "TOPR leaves invalid answers"

parts = {cell["part"]: result for cell, result in store.results(theory.cells(profile, store))}
assert parts["identity"]["largest_difference"] < 1e-12
last = {float(a): points[-1][1] for a, points in parts["bound"]["curves"].items()}
assert last.pop(0.0) <= parts["bound"]["upper_bound"] < min(last.values())
