#!/bin/bash
# One replica of octopus.sbatch, which srun starts once for each GPU; it sees that GPU alone.
set -euo pipefail

port=$((7040 + SLURM_LOCALID))
exec octopus rollout --config "$PRESETS/nodes_rollout.toml" \
  --run "$RUN" --run-folder "$RUNS" --model.path "$MODEL" \
  --replica-id "$SLURMD_NODENAME-$SLURM_LOCALID" \
  --server.port "$port" --server.advertise "$SLURMD_NODENAME:$port" \
  --metrics.host 0.0.0.0 --metrics.port $((9464 + SLURM_LOCALID))
