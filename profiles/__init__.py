"""What is known: models, GPUs, links, clusters, and the profiler that measures them."""
