"""Tapered Off-Policy REINFORCE (arXiv 2503.14286) for TRL."""

import sys

import lazy_loader

from topr_trl.renamed import FUNCTIONS, MODULES, MovedModules
from topr_trl.warn import warn_user

__version__ = "0.3.0.dev0"

# What is public is listed in __init__.pyi, and imported when it is first used: torch and TRL take seconds, for which
# neither help nor a misspelled command should wait.
_find, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
sys.meta_path.append(MovedModules())


def __getattr__(name: str) -> object:
    if name in MODULES:  # from topr_trl import candidates
        raise ModuleNotFoundError(f"topr_trl.{name} is topr_trl.{MODULES[name]} now.", name=f"topr_trl.{name}")
    if name in FUNCTIONS:
        warn_user(f"topr_trl.{name} is called {FUNCTIONS[name]} now.", FutureWarning)
    return _find(FUNCTIONS.get(name, name))
