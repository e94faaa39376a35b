"""Prepare Python's fork server, from which the stages of a loop are forked. The server imports this module first.

The server is a child of the loop, and the stages are children of the server. So if the loop is killed, the kernel ends
the server, and then the stages.
"""

import os
import signal

from topr_trl.pipeline.parent_process import KILL, end_with_parent

# Libraries ask at import whether there is a GPU. With this setting, PyTorch answers without creating a CUDA context,
# which forked processes could not use.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
signal.signal(signal.SIGINT, signal.SIG_IGN)  # The loop handles Ctrl+C, also while the server imports libraries.
end_with_parent(KILL)
