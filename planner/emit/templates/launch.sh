#!/usr/bin/env bash
# $title
# Starts $processes workers ($nodes x $per_node) of $target with torchrun. On several nodes, run it once on each, with NODE_RANK (0..$last_node) and
# MASTER_ADDR (the address of node 0) set. Arguments go to the worker.
set -euo pipefail
here=$$(cd -- "$$(dirname -- "$${BASH_SOURCE[0]}")" && pwd)

$needs
$environment

$torchrun
$rendezvous
worker=(
$words
)
exec "$$torchrun" --nnodes $nodes --nproc-per-node $per_node "$${rendezvous[@]}" "$${worker[@]}" "$$@"
