#!/usr/bin/env bash
# $title
# Starts $processes workers ($nodes x $per_node) with torchrun. On several nodes, run it once on each, with NODE_RANK (0..$last_node) and
# MASTER_ADDR (the address of node 0) set. Arguments go to the worker: ./launch.sh --steps 100
set -euo pipefail
here=$$(cd -- "$$(dirname -- "$${BASH_SOURCE[0]}")" && pwd)

# No folder named planner/ or profiles/ where this is started from may take the place of axisplan's own packages.
export PYTHONSAFEPATH=1
$environment
axisplan=$$(command -v axisplan) || { echo "launch.sh: axisplan is not on PATH; activate the environment it is installed in" >&2; exit 1; }
torchrun=$$(dirname -- "$$axisplan")/torchrun
[ -x "$$torchrun" ] || torchrun=$$(command -v torchrun) || { echo "launch.sh: torchrun is not on PATH" >&2; exit 1; }

$rendezvous
exec "$$torchrun" --nnodes $nodes --nproc-per-node $per_node "$${rendezvous[@]}" \
  --no-python "$$axisplan" worker train "$$here/plan.json" --settings "$$here/train.json" "$$@"
