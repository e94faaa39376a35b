"""What the quick profile of the benchmarks has to show: only what is far outside noise."""

from pathlib import Path

from benchmarks.__main__ import open_store
from benchmarks.claims import base, rivals_compared, theory
from benchmarks.setting import PROFILES

profile = PROFILES["quick"]
store = open_store(Path("reproduction/quick"), profile)
start = base.point(store, profile)
ends = {cell["rival"]: result["curve"][-1] for cell, result in store.results(rivals_compared.cells(profile, store))}
for name, end in {"base model": start, **ends}.items():
    print(f"{name:16} pass@1 {end['pass@1']:5.1%}, invalid {end['invalid']:5.1%}")

assert ends["topr"]["pass@1"] > start["pass@1"] + 0.05, "TOPR does not improve the base model"
assert ends["topr"]["invalid"] < start["invalid"] / 4, "TOPR leaves invalid answers"
assert ends["reinforce"]["pass@1"] < start["pass@1"] / 4, "naive REINFORCE does not collapse"

parts = {cell["part"]: result for cell, result in store.results(theory.cells(profile, store))}
last = {float(a): points[-1][1] for a, points in parts["bound"]["curves"].items()}
assert parts["identity"]["largest_difference"] < 1e-12, "Prop. 3.1 does not hold"
assert last.pop(0.0) <= parts["bound"]["upper_bound"] < min(last.values()), "Prop. 3.2 does not hold"
