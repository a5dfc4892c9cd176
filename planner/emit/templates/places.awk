# Lines "place <node> <name> <host> <gpus or -> <switches>" of every node -> exit 1, the problems and the map when ranks sit wrong.
# Variables: nodes, per_node, tp, within (what must hold a tensor-parallel group: node, rack or any).
function problem(text) { problems[++count] = text }
$$1 != "place" { next }
{
  node = $$2
  if (node in host) problem("node " node " was reported twice: by " host[node] " and " $$4)
  if ($$4 in node_of) problem("host " $$4 " is node " node_of[$$4] " and node " node " at once")
  host[node] = $$4; node_of[$$4] = node; name[node] = $$3; gpus[node] = $$5; rack[node] = $$6
  if ($$5 != "-" && $$5 < per_node) problem("node " node " (" $$4 ") has " $$5 " GPUs, the plan needs " per_node)
}
END {
  for (node = 0; node < nodes; node++)
    if (!(node in host)) problem("node " node " did not report")
  if (within != "any" && !count)
    for (first = 0; first < nodes * per_node; first += tp) {
      low = int(first / per_node); high = int((first + tp - 1) / per_node)
      for (node = low + 1; node <= high; node++)
        if (within == "node" || rack[node] != rack[low]) {
          problem("tensor-parallel group of ranks " first " to " first + tp - 1 " spans " host[low] " and " host[node])
          break
        }
    }
  if (!count) exit 0
  for (i = 1; i <= count; i++) print "job.sbatch: " problems[i] > "/dev/stderr"
  print "job.sbatch: ranks, node, name, host, GPUs:" > "/dev/stderr"
  for (node = 0; node < nodes; node++)
    printf "  %5d-%-5d %4d  %s  %s  %s\n", node * per_node, (node + 1) * per_node - 1, node, (node in host) ? name[node] : "?", \
      (node in host) ? host[node] : "?", (node in host) ? gpus[node] : "?" > "/dev/stderr"
  exit 1
}
