"""Experimental trainers, which can change without notice because they build on TRL's experimental trainer."""

import lazy_loader

# Names are imported on first use. TRL 1.15 lacks the base trainer, so the import then fails.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
