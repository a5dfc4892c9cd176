"""Plan -> training, on torch.distributed: one module an axis, its collectives beside it; the mesh is passed in."""
