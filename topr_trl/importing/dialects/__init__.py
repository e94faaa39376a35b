"""Ways to write a request and its answers, one module each: the messages of APIs and of libraries.

Each module defines a `DIALECT`. An envelope with `DIALECTS` reads all of them. If a module also defines a `FORMAT`, the
name of the module is a name in `--format`, for logs that have no envelope of their own.
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
