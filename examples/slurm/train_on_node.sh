#!/bin/bash
# Start the training processes of one machine. srun starts this script once per machine. Its arguments begin with the
# five words `python -m accelerate.commands.launch --config_file FILE`. Add the rank and the first machine to them.
# The loop needs `accelerate_config` for this script. Without it, the arguments do not begin with these words.
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
exec "${@:1:5}" --machine_rank "$SLURM_PROCID" --main_process_ip "$first" "${@:6}"
