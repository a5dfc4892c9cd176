#!/usr/bin/env bash
# $title
# Starts $processes workers ($nodes x $per_node) of $target with torchrun. On several nodes, run it once on each, with NODE_RANK (0..$last_node) and
# MASTER_ADDR (the address of node 0) set. Arguments go to the worker; --check measures the cluster instead.
set -euo pipefail
here=$$(cd -- "$$(dirname -- "$${BASH_SOURCE[0]}")" && pwd)

$needs
$environment

$torchrun
$rendezvous
starter=($starter)
worker=(
$words
)
if [ "$${1:-}" = --check ]; then
  # Instead of training: measure each GPU and each axis's links against the plan (at most a minute), name what is slow or misplaced.
  shift
  checker=$$(command -v axisplan) || { echo "launch.sh: --check needs axisplan on PATH, on every node" >&2; exit 1; }
  worker=(--no-python "$$checker" worker check "$$here/plan.json")
  starter=()
fi
exec $${starter[@]+"$${starter[@]}"} "$$torchrun" --nnodes $nodes --nproc-per-node $per_node "$${rendezvous[@]}" "$${worker[@]}" "$$@"
