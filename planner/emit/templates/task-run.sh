[ "$$SKYPILOT_NUM_NODES" -eq $hosts ] || { echo "task.yaml: the plan is for $hosts nodes, not $$SKYPILOT_NUM_NODES" >&2; exit 1; }
export NODE_RANK="$$SKYPILOT_NODE_RANK"
MASTER_ADDR=$$(head -n1 <<< "$$SKYPILOT_NODE_IPS")
export MASTER_ADDR
exec bash ./launch.sh
