"""Experimental: may change without notice, because it builds on TRL's experimental trainer."""

import lazy_loader

# As in the package itself. TRL 1.15 has no trainer to build on, and says so when one of the names is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
