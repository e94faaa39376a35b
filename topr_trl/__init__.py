"""Tapered Off-Policy REINFORCE (arXiv 2503.14286) for TRL."""

import lazy_loader

__version__ = "0.3.0.dev0"

# What is public is listed in __init__.pyi, and imported when it is first used: torch and TRL take seconds, for which
# neither help nor a misspelled command should wait.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
