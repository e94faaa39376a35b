"""File formats that `topr import` reads, one module each.

In `--format`, the name of a module has hyphens: `nemo_rl.py` is `nemo-rl`. Each module defines a `FORMAT`.
`FORMATS` also has the formats of the dialects.
"""

import pkgutil
from importlib import import_module

from topr_trl.importing import dialects
from topr_trl.importing.format import Format

_MODULES = {
    **{name: module for name, module in dialects.MODULES.items() if hasattr(module, "FORMAT")},
    **{
        module.name.replace("_", "-"): import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    },
}
FORMATS: dict[str, Format] = {name: module.FORMAT for name, module in sorted(_MODULES.items())}
