"""Dialects of APIs and libraries, one module each: formats of a request and its answers.

Each module defines a `DIALECT`. An envelope with `DIALECTS` reads all dialects. If a module also defines a `FORMAT`,
`--format` takes the name of the module, with hyphens, for logs that have no envelope of their own.
"""

import pkgutil
from importlib import import_module
from types import ModuleType

from topr_trl.importing.calls import Dialect

MODULES: dict[str, ModuleType] = {
    module.name.replace("_", "-"): import_module(f"{__name__}.{module.name}")
    for module in pkgutil.iter_modules(__path__)
}
DIALECTS: tuple[Dialect, ...] = tuple(module.DIALECT for module in MODULES.values())
