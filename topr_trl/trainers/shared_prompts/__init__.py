"""Compute a prompt once for all of its completions in a batch.

The trainers use only `PromptSharing`. `layout.py` converts batches, `attention.py` changes the model's forward pass,
and `check.py` tests whether log π stays the same.

On a CPU, a step with shared prompts was 1.6 to 4.9 times faster. On a GPU, it was faster in one of four measured cases,
so there it is off by default. The price is an attention that must know the groups of a batch, for each kind of model.
"""

from topr_trl.trainers.shared_prompts.attention import remove_shared_prompts
from topr_trl.trainers.shared_prompts.sharing import PromptSharing, share_generated, share_stored

__all__ = ["PromptSharing", "remove_shared_prompts", "share_generated", "share_stored"]
