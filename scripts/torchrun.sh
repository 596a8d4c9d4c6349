#!/usr/bin/env bash
# Starts one node's processes by torchrun; the same line on every node of a run.
#   scripts/torchrun.sh fit --config configs/setting_a.yaml --config configs/strategy/fsdp.yaml
# NODES        nodes of the run                                      (1)
# DEVICES      processes on each node, one for each device           (8)
# HEAD         host and port of the first node, reachable from all   (localhost:29500)
# NODE         this node's number, from 0                            (0)
set -euo pipefail
nodes=${NODES:-1} devices=${DEVICES:-8} head=${HEAD:-localhost:29500} node=${NODE:-0}
if ((nodes == 1)); then
    where=(--standalone)
else
    where=(--nnodes "$nodes" --node_rank "$node" --master_addr "${head%:*}" --master_port "${head##*:}")
fi
exec torchrun "${where[@]}" --nproc_per_node "$devices" -m recast_pl "$@" \
    --trainer.devices "$devices" --trainer.num_nodes "$nodes"
