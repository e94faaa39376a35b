#!/bin/bash
# Run one sampling worker. srun starts this script once per worker, with the command of topr iterate as its arguments.
set -euo pipefail
exec "$@" --worker "$SLURM_PROCID/$SLURM_NTASKS"
