"""Check that the demo improved each measure, with a 95% interval above 0."""

import json
import sys
from pathlib import Path

gains = json.loads((Path(sys.argv[1]) / "gains.json").read_text())
for measure in ("greedy", "pass@1", "maj@8", "pass@8"):
    low, difference = (100 * gains[measure][name] for name in ("low", "difference"))
    print(f"{measure} {difference:+.1f} points, at least {low:+.1f}")
    assert low > 0, f"{measure} did not improve"
