"""Tapered Off-Policy REINFORCE (arXiv 2503.14286) for TRL."""

import lazy_loader

__version__ = "0.3.0.dev0"

# The public names are in __init__.pyi. A name is imported when it is first used, because importing torch and TRL takes
# seconds. Help and errors about a misspelled command must appear at once.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
