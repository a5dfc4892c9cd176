#!/usr/bin/env bash
# One node of the job, started by srun once on each. Its rank is its place in the host list. With --place it only says where it is.
set -euo pipefail
here=$$(cd -- "$$(dirname -- "$${BASH_SOURCE[0]}")" && pwd)
read -ra hosts <<< "$$AXISPLAN_HOSTS"
me=$${SLURMD_NODENAME:-$$(hostname -s)}
NODE_RANK=
for index in "$${!hosts[@]}"; do
  if [ "$${hosts[index]}" = "$$me" ]; then NODE_RANK=$$index; fi
done
[ -n "$$NODE_RANK" ] || { echo "node.sh: $$me is not in the host list: $${hosts[*]}" >&2; exit 1; }
if [ "$${1:-}" = --place ]; then
  gpus=-
  if command -v nvidia-smi > /dev/null; then gpus=$$(nvidia-smi --list-gpus | wc -l); fi
  switch=$${SLURM_TOPOLOGY_ADDR:-}
  echo "place $$NODE_RANK $$me $$(hostname) $$gpus $${switch%.*}"
  exit
fi
export NODE_RANK
exec bash "$$here/launch.sh" "$$@"
